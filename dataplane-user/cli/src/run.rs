//! `dataplane run`.

use std::{env, process::ExitCode};

use agent::InputError;
use clap::{ArgMatches, Args, FromArgMatches as _, error::ErrorKind, parser::ValueSource};
use kernel::probe;
use settings::{Dns, Mesh, MetricsAuth, Settings, config, faults};
use terminal::{PathArgs, Refusal, SocketArgs, exit};

use super::{Command, log, settled, source::SourceArgs};

/// Run the agent on this node.
///
/// Reads Kubernetes Services and EndpointSlices from files or from the API server, keeps the kernel's
/// tables in line with them, and attaches the programs that serve them. Runs in the foreground; SIGTERM and
/// Ctrl-C end the agent. SIGHUP makes it read the manifests again; it also notices changes by itself.
/// Services stay up while the agent is killed or restarted: the next agent adopts the tables.
///
/// The options here are the settings that one types by hand. The configuration file (--config) has all settings:
/// docs/configuration.md, `dataplane config schema`.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Log more (-v: debug, -vv: trace). RUST_LOG sets levels by module
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,

    /// The values of the flags; after `fill_from`, also those of the file.
    #[command(flatten)]
    pub(super) settings: Settings,

    /// The workloads whose TCP connections go to a proxy: the value of `mesh:` in a configuration file,
    /// in YAML [default: no workload's]
    #[arg(
        long,
        value_name = "YAML",
        value_parser = config::mesh,
        env = "DATAPLANE_MESH",
        help_heading = "Mesh"
    )]
    mesh: Option<Mesh>,

    /// The agent's DNS server: the value of `dns:` in a configuration file, in YAML [default: nobody's
    /// queries are captured]
    #[arg(
        long,
        value_name = "YAML",
        value_parser = config::dns,
        env = "DATAPLANE_DNS",
        help_heading = "Mesh"
    )]
    dns: Option<Dns>,

    #[command(flatten)]
    paths: PathArgs,

    #[command(flatten)]
    socket: SocketArgs,
}

/// Flags without a value. For clap, a missing flag has the value false.
type Switch = (&'static str, fn(&mut Settings) -> &mut bool);
const SWITCHES: [Switch; 2] = [
    ("replace", |settings| &mut settings.replace),
    ("stay", |settings| &mut settings.stay),
];

impl RunArgs {
    /// Fills the settings from the file, and overrides them from the environment and the command line.
    pub(super) fn fill_from(
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
        self.source.fill_from(file);
        self.paths.fill_from(file);
        self.socket.fill_from(file);
        settings.source = self.source.settings().clone();
        settings.kernel.bpffs.clone_from(&self.paths.bpffs);
        settings.kernel.cgroup.clone_from(&self.paths.cgroup);
        settings.listen.socket.clone_from(&self.socket.socket);
        terminal::fill(&mut self.mesh, file.mesh.as_ref());
        settings.mesh.clone_from(&self.mesh);
        terminal::fill(&mut self.dns, file.dns.as_ref());
        settings.dns.clone_from(&self.dns);
        settings.log.level = log::level(self.verbose).or(file.log.level);
        let from_api = settings.source.kubernetes.is_some();
        if settings.listen.metrics_auth == Some(MetricsAuth::Kubernetes) && !from_api {
            let text = "listen.metricsAuth: kubernetes needs the Kubernetes API as the source; use --kubernetes, or \
                        `metricsAuth: none`\n";
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, text));
        }
        if let Some((key, what)) = faults(&settings).into_iter().next() {
            // The file alone has no such fault: it comes from the combination with flags.
            let text = format!("{key}: {what}\n");
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, text));
        }
        self.settings = settings;
        Ok(())
    }
}

/// Returns the settings by the present configuration file.
fn read_again() -> Result<Settings, String> {
    let cli = super::parse(env::args_os()).map_err(|refusal| match refusal {
        Refusal::Usage(error) => error.to_string(),
        Refusal::Config(errors) => errors.to_string(),
    })?;
    let Command::Run(args) = cli.command else {
        // Not possible: the command line is that of this process.
        return Err("the command line is not `run`".to_owned());
    };
    // A running agent finds the paths again, and an error there would end it. So they are checked here.
    let found = kernel::Paths::find(
        args.settings.kernel.bpffs(),
        args.settings.kernel.cgroup.clone(),
    );
    found.map_err(|error| error.to_string())?;
    Ok(args.settings)
}

impl RunArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let settings = &self.settings.log;
        log::start(
            settings.level.unwrap_or_default(),
            settings.format.unwrap_or_default(),
        );
        let run = agent::run(self.settings.clone(), read_again);
        match run {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) if error.is_busy() => {
                eprintln!("dataplane: {error}");
                eprintln!(
                    "A node has one agent: end that agent first, or use --replace to take over from it."
                );
                Ok(ExitCode::from(exit::BUSY))
            }
            // A fault of the source does not depend on the machine.
            Err(
                error @ (agent::Error::Manifests(_) | agent::Error::Input(InputError::Open(_))),
            ) => Err(error.into()),
            Err(error) => Ok(self.cannot_run(&error)),
        }
    }

    /// Prints one message with a remedy: the first feature that this machine lacks, or the error.
    fn cannot_run(&self, error: &dyn std::error::Error) -> ExitCode {
        let features = probe::features(&kernel::Paths::find_or_guess(
            self.settings.kernel.bpffs(),
            self.settings.kernel.cgroup.clone(),
        ));
        let mut missing = features.iter().filter(|f| f.required && !f.present);
        // Basic features come first, and others may be missing because of them.
        let Some(first) = missing.next() else {
            eprintln!("dataplane: {error}");
            return ExitCode::FAILURE;
        };
        eprintln!(
            "dataplane: cannot run without {} (needed for: {}): {}",
            first.name, first.needed_for, first.detail
        );
        eprintln!("What to do: {}", first.remedy);
        eprintln!("`dataplane doctor` lists all requirements.");
        ExitCode::FAILURE
    }
}
