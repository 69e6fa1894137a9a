//! The benchmark harness, and the peers that it compares with.

mod clock;
pub mod dns;
pub mod extent;
pub mod fleet;
pub mod import;
pub mod manifests;
pub mod measurement;
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

/// Says on stderr how far the benchmark is.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {
        anstream::eprintln!("{:>6.1} s  {}", $crate::elapsed().as_secs_f64(), format!($($text)*))
    };
}

/// Time since this was first called.
pub fn elapsed() -> std::time::Duration {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed()
}
