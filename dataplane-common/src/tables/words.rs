//! Words that one access reads whole: the kind of a frontend, the frontend, and the block of endpoints.

layout! {
    /// The kind of a frontend's address.
    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub struct Kind(u8);
}

impl Kind {
    /// A port of a service's cluster IP.
    pub const CLUSTER_IP: Self = Self(1);
    /// A port of an external IP (`spec.externalIPs`).
    pub const EXTERNAL_IP: Self = Self(2);
    /// A port of a load balancer's ingress IP.
    pub const LOAD_BALANCER: Self = Self(3);
    /// A node port.
    pub const NODE_PORT: Self = Self(4);
    /// A cluster IP as such: a port that has no key is refused.
    pub const CLUSTER_ADDRESS: Self = Self(5);
    /// An address of this node: a port that has no key may be a node port.
    pub const NODE_ADDRESS: Self = Self(6);

    /// The number, for events and logs.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// The word that a person reads.
    pub const fn word(self) -> &'static str {
        match self {
            Self::CLUSTER_IP => "ClusterIP",
            Self::EXTERNAL_IP => "ExternalIP",
            Self::LOAD_BALANCER => "LoadBalancer",
            Self::NODE_PORT => "NodePort",
            Self::CLUSTER_ADDRESS => "cluster address",
            Self::NODE_ADDRESS => "node address",
            Self(_) => "unknown",
        }
    }
}

impl core::fmt::Debug for Kind {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.word())
    }
}

layout! {
    /// The pool that answers a [`FrontendKey`](super::FrontendKey), in one word. It never changes while the key belongs to one service:
    /// only the pool changes.
    ///
    /// Bits 0-31: index into `POOLS`, 0 (which is never a pool) for [`Kind::NODE_ADDRESS`]; 32-39: the
    /// kind.
    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Frontend(u64);
}

impl Frontend {
    /// No frontend: the result of a lookup of a key that is not there.
    ///
    /// In user space, an `Option` would do. In the programs, the compiler leaves the payload of a `None` undefined but
    /// may still copy it, and the verifier rejects a program that does.
    pub const NONE: Self = Self(0);

    /// A frontend of `kind`, answered by `pool`.
    #[inline(always)]
    pub const fn new(pool: u32, kind: Kind) -> Self {
        Self(pool as u64 | (kind.0 as u64) << 32)
    }

    /// From the word in the table.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// The word in the table.
    #[inline(always)]
    pub const fn word(self) -> u64 {
        self.0
    }

    /// Index into `POOLS`.
    #[inline(always)]
    pub const fn pool(self) -> u32 {
        (self.0 & 0xffff_ffff) as u32
    }

    /// Returns the kind of the key's address.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the field's eight bits")]
    pub const fn kind(self) -> Kind {
        Kind((self.0 >> 32) as u8)
    }

    /// Whether this is [`Frontend::NONE`].
    #[inline(always)]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

impl core::fmt::Debug for Frontend {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} -> pool {}", self.kind(), self.pool())
    }
}

layout! {
    /// Where a pool's endpoints are, in one word: read and written as a whole, so that a reader sees
    /// the old endpoints or the new ones and never a mixture.
    ///
    /// Bits 0-31: first slot in `ENDPOINTS`; 32-47: how many; 48-63: flags.
    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Block(u64);
}

impl Block {
    /// Flag: the pool is empty because of a traffic policy, and not because the service has no endpoints.
    pub const NO_LOCAL: u16 = 1;
    /// Flag: the pool of a cluster address, which answers the ports that the service does not
    /// have. Always empty.
    pub const NO_SUCH_PORT: u16 = 2;
    /// Flag: every endpoint is a Pod's, or in a range that the operator has stated: a workload whose egress policy is deny
    /// may reach the service.
    pub const REACHABLE: u16 = 4;
    /// Flag: captured workloads may not connect to the service by TCP ([`crate::Reason::Unsupported`]).
    pub const REFUSED: u16 = 8;
    /// Flag: some endpoint speaks HBONE, or several Pods have its address and one of them does, or the service has a waypoint.
    pub const HBONE: u16 = 16;
    /// Flag beside [`Self::HBONE`]: the service has a waypoint. No program reads it, only `explain`.
    pub const WAYPOINT: u16 = 32;
    /// The most endpoints that one pool can have.
    pub const MAX_LEN: usize = u16::MAX as usize;

    /// The block of `len` endpoints from slot `base` on.
    #[inline(always)]
    pub const fn new(base: u32, len: u16, flags: u16) -> Self {
        Self(base as u64 | (len as u64) << 32 | (flags as u64) << 48)
    }

    /// From the word in the table.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// The word in the table.
    #[inline(always)]
    pub const fn word(self) -> u64 {
        self.0
    }

    /// First slot in `ENDPOINTS`.
    #[inline(always)]
    pub const fn base(self) -> u32 {
        (self.0 & 0xffff_ffff) as u32
    }

    /// How many endpoints.
    #[inline(always)]
    pub const fn len(self) -> u16 {
        (self.0 >> 32 & 0xffff) as u16
    }

    /// Whether there is none.
    #[inline(always)]
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The flags.
    #[inline(always)]
    pub const fn flags(self) -> u16 {
        (self.0 >> 48) as u16
    }
}

impl core::fmt::Debug for Block {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}+{}", self.base(), self.len())?;
        if self.flags() != 0 {
            write!(f, " flags {:#x}", self.flags())?;
        }
        Ok(())
    }
}
