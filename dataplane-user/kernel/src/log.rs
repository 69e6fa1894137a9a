//! The programs' log: bugs of ours that should not happen, one line each. (Verdicts are not in the log: they are
//! counted, and `dataplane monitor` shows them.)

use std::fmt;

use aya::Ebpf;
use aya_log::EbpfLogger;

/// The programs' log, passed on to the agent's.
pub struct ProgramLog(EbpfLogger<&'static dyn log::Log>);

impl ProgramLog {
    /// The log of freshly loaded programs; `None` if the kernel does not let it be read.
    pub fn new(ebpf: &mut Ebpf) -> Option<Self> {
        EbpfLogger::init(ebpf).map(Self).ok()
    }

    /// Passes on the records since the last call.
    pub fn pass_on(&mut self) {
        self.0.flush();
    }
}

impl fmt::Debug for ProgramLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProgramLog")
    }
}
