//! The benchmark harness, and the programs that the dataplane is compared with.

mod clock;
pub mod dns;
pub mod extent;
pub mod fleet;
pub mod import;
pub mod manifests;
pub mod measurement;
mod node_worker;
pub mod packet;
pub mod plot;
pub mod relay;
pub mod rows;
pub mod socket;
pub mod stage;
pub mod stats;
pub mod sync;
pub mod tables;
pub mod worker;

/// Reports the benchmark's progress on stderr.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {
        anstream::eprintln!("{:>6.1} s  {}", $crate::elapsed().as_secs_f64(), format!($($text)*))
    };
}

/// Returns the time since the first call of this function.
pub fn elapsed() -> std::time::Duration {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed()
}
