//! Names with two parts: a namespace, and a name in it.

use std::{fmt, sync::Arc};

/// Makes a type for each kind of object, so that the compiler rejects the name of an object of another kind.
macro_rules! names {
    ($($(#[$about:meta])* $Name:ident;)*) => {$(
        $(#[$about])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $Name(Arc<str>);

        impl $Name {
            /// From its two parts. Neither contains a `/` (Kubernetes names are DNS labels).
            pub fn new(namespace: &str, name: &str) -> Self {
                Self(format!("{namespace}/{name}").into())
            }

            /// The namespace.
            pub fn namespace(&self) -> &str {
                self.0.split_once('/').map_or("", |(namespace, _)| namespace)
            }

            /// The name within the namespace.
            pub fn name(&self) -> &str {
                self.0.split_once('/').map_or(&self.0, |(_, name)| name)
            }

            /// Both, as `namespace/name`.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

names! {
    /// A service's namespace and name, as `namespace/name`.
    ServiceName;
    /// A workload's namespace and name, as `namespace/name`: of a pod, or as the configuration file
    /// names processes that are in none.
    WorkloadName;
    /// A ServiceEntry's namespace and name, as `namespace/name`.
    EntryName;
}
