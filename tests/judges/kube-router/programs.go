//go:build judges

// Package judges pins the programs that `cargo xtask judges` builds. None of their source is here.
package judges

import _ "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
