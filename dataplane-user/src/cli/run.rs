//! `dataplane run`.

use std::{
    env,
    io::{self, IsTerminal},
    process::ExitCode,
};

use clap::{ArgMatches, Args, FromArgMatches as _, error::ErrorKind, parser::ValueSource};

use super::{Command, PathArgs, Refusal, SocketArgs, exit, settled, source::SourceArgs};
use crate::{
    agent::{self, InputError},
    config,
    kernel::probe,
    settings::{LogFormat, Mesh, Settings, faults},
};

/// Run the agent on this node.
///
/// Reads Kubernetes Services and EndpointSlices, from files or from the API server, keeps the kernel's tables in line with them, and
/// attaches the programs that serve them. Runs in the foreground; SIGTERM or Ctrl-C ends it, and
/// SIGHUP has it read manifests again (it also notices by itself). Killed or restarted, it
/// leaves services up, and finds the tables again when it starts.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Say more in the log; twice: still more. RUST_LOG is finer
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,

    /// What the flags say; once it is settled, also what the file says.
    #[command(flatten)]
    pub(super) settings: Settings,

    /// Whose TCP connections go to a proxy: what a configuration file has below `mesh:`, in YAML
    /// [default: nobody's]
    #[arg(
        long,
        value_name = "YAML",
        value_parser = config::mesh,
        env = "DATAPLANE_MESH",
        hide_env_values = true,
        help_heading = "Mesh"
    )]
    mesh: Option<Mesh>,

    #[command(flatten)]
    paths: PathArgs,

    #[command(flatten)]
    socket: SocketArgs,
}

/// Flags without a value, which clap counts as said to be false if they are missing.
type Switch = (&'static str, fn(&mut Settings) -> &mut bool);
const SWITCHES: [Switch; 4] = [
    ("replace", |settings| &mut settings.replace),
    ("stay", |settings| &mut settings.stay),
    ("pods-by-interface", |settings| {
        &mut settings.packets.pods_by_interface
    }),
    ("masquerade-all", |settings| {
        &mut settings.packets.masquerade_all
    }),
];

impl RunArgs {
    /// Has the settings be the file's, with what the command line and the environment say in place of it.
    pub(super) fn settle(
        &mut self,
        file: &Settings,
        given: &ArgMatches,
    ) -> Result<(), clap::Error> {
        let mut settings = file.clone();
        settings.update_from_arg_matches(given)?;
        for (id, of) in SWITCHES {
            if given.value_source(id) == Some(ValueSource::DefaultValue) {
                *of(&mut settings) = *of(&mut file.clone());
            }
        }
        settled::name(&mut settings.node);
        self.source.settle(file);
        self.paths.settle(file);
        self.socket.settle(file);
        settings.source = self.source.settled().clone();
        settings.kernel.bpffs.clone_from(&self.paths.bpffs);
        settings.kernel.cgroup.clone_from(&self.paths.cgroup);
        settings.listen.socket.clone_from(&self.socket.socket);
        settled::fill(&mut self.mesh, file.mesh.as_ref());
        settings.mesh.clone_from(&self.mesh);
        settings.log.level = super::log_level(self.verbose).or(file.log.level);
        if let Some((key, what)) = faults(&settings).into_iter().next() {
            // The file has none by itself.
            let text = format!("{key}: {what}\n");
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, text));
        }
        self.settings = settings;
        Ok(())
    }
}

/// The settings by the configuration as it is now.
fn read_again() -> Result<Settings, String> {
    let cli = super::parse(env::args_os()).map_err(|refusal| match refusal {
        Refusal::Usage(error) => error.to_string(),
        Refusal::Config(errors) => errors.to_string(),
    })?;
    let Command::Run(args) = cli.command else {
        // As it was when this process started.
        return Err("the command line is not `run`".to_owned());
    };
    // The agent finds out again what it has to serve, and must not end by that.
    let found = args.settings.kernel.paths();
    found.map_err(|error| error.to_string())?;
    Ok(args.settings)
}

impl RunArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.start_log();
        let run = agent::run(self.settings.clone(), read_again);
        match run {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) if error.is_busy() => {
                eprintln!("dataplane: {error}");
                eprintln!("One agent per node: end that one first, or leave it to its work.");
                Ok(ExitCode::from(exit::BUSY))
            }
            // What is wrong with the source has nothing to do with the machine.
            Err(
                error @ (agent::Error::Manifests(_) | agent::Error::Input(InputError::Open(_))),
            ) => Err(error.into()),
            Err(error) => Ok(self.cannot_run(&error)),
        }
    }

    /// One message that says what to do: what this machine lacks, if it lacks something, and else
    /// what went wrong.
    fn cannot_run(&self, error: &dyn std::error::Error) -> ExitCode {
        let features = probe::features(&self.settings.kernel.paths_or_guess());
        let mut missing = features.iter().filter(|f| f.required && !f.present);
        // The most basic come first, and what else is missing may be so for want of it.
        let Some(first) = missing.next() else {
            eprintln!("dataplane: {error}");
            return ExitCode::FAILURE;
        };
        eprintln!(
            "dataplane: cannot run here for want of {} (needed for: {}): {}",
            first.name, first.needed_for, first.detail
        );
        eprintln!("What to do: {}", first.remedy);
        eprintln!("`dataplane doctor` shows everything that it takes.");
        ExitCode::FAILURE
    }

    fn start_log(&self) {
        let settings = &self.settings.log;
        let filter = super::log_filter(settings.level.unwrap_or_default());
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(io::stderr);
        match settings.format.unwrap_or_default() {
            LogFormat::Json => log.json().init(),
            LogFormat::Text => {
                let colour = io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none();
                log.with_ansi(colour).with_target(false).init();
            }
        }
    }
}
