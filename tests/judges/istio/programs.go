//go:build judges

// Package judges pins the programs that `cargo xtask judges` builds. None of their source is here.
package judges

import (
	_ "istio.io/istio/istioctl/cmd/istioctl"
	_ "istio.io/istio/pilot/cmd/pilot-discovery"
)
