//! The log of commands that run until they are ended, on standard error.

use std::{
    env,
    io::{self, IsTerminal as _},
    sync::Arc,
};

use proxy::admin::Logging;
use settings::{LogFormat, LogLevel};
use tracing_subscriber::{EnvFilter, reload};

/// Returns the level for the number of `--verbose` flags. `None`: the level of the file.
pub(crate) fn level(verbose: u8) -> Option<LogLevel> {
    match verbose {
        0 => None,
        1 => Some(LogLevel::Debug),
        _ => Some(LogLevel::Trace),
    }
}

/// Starts the log, and returns the handle that changes its filter. `RUST_LOG` replaces `level`.
pub(crate) fn start(level: LogLevel, format: LogFormat) -> Logging {
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .with_writer(io::stderr);
    match format {
        LogFormat::Json => {
            let log = log.json().with_filter_reloading();
            let logging = logging(log.reload_handle());
            log.init();
            logging
        }
        LogFormat::Text => {
            let colour = io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none();
            let log = log.with_ansi(colour).with_target(false);
            let log = log.with_filter_reloading();
            let logging = logging(log.reload_handle());
            log.init();
            logging
        }
    }
}

fn filter(level: LogLevel) -> EnvFilter {
    let level = match level {
        // Messages of libraries help few readers, and the agent itself reports failed requests.
        LogLevel::Info => "info,kube_client=off",
        LogLevel::Debug => "info,kube_client=off,dataplane=debug",
        LogLevel::Trace => "debug,dataplane=trace",
    };
    EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level))
}

fn logging<S: 'static>(handle: reload::Handle<EnvFilter, S>) -> Logging {
    let current = handle.clone();
    Logging {
        current: Arc::new(move || {
            let current = current.with_current(ToString::to_string);
            current.unwrap_or_else(|error| error.to_string())
        }),
        set: Arc::new(move |text| {
            let filter = EnvFilter::try_new(text).map_err(|error| error.to_string())?;
            handle.reload(filter).map_err(|error| error.to_string())
        }),
    }
}
