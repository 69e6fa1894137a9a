//! The task that gets and renews the certificate of one identity.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use model::Identity;
use rustls::pki_types::CertificateDer;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout},
};

use super::{Failure, Inner, State};
use crate::{Credential, Source, peer::Shown};

/// Maximum time of an attempt.
const TIMEOUT: Duration = if cfg!(test) {
    Duration::from_millis(500)
} else {
    Duration::from_secs(10)
};
/// Delay after the first failure. It doubles with each further failure.
const BACKOFF: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_mins(1);
/// Interval at which a waiting task reads the clock, which may have jumped.
const CLOCK: Duration = if cfg!(test) {
    Duration::from_millis(10)
} else {
    Duration::from_secs(15)
};
/// Minimum time between two renewals.
const RENEW_MIN: Duration = Duration::from_secs(1);
/// Part of the remaining lifetime after which a certificate is renewed. It is random, so that nodes that start together do not
/// renew together.
const RENEW_AT: std::ops::Range<f64> = 0.45..0.55;

impl Inner {
    /// Gets and renews the certificate of an identity. Never ends: the store aborts the task when the identity is no longer
    /// wanted.
    pub(super) async fn keep(
        self: Arc<Self>,
        identity: Identity,
        state: watch::Sender<State>,
        hurry: Arc<Notify>,
    ) {
        let mut files = self.files.clone();
        let mut failures = 0;
        loop {
            files.mark_unchanged();
            let result = self.attempt(&identity).await;
            let now = (self.clock)();
            let next = match result {
                Ok((credential, roots)) => {
                    failures = 0;
                    let next = now + renewal(&credential, now);
                    self.replace(&state, credential, roots);
                    next
                }
                Err(cause) => {
                    failures += 1;
                    let failed = Failure {
                        cause: cause.into(),
                        at: now,
                        next: now + backoff(failures),
                    };
                    report(&identity, &failed, state.borrow().failed.as_ref());
                    let next = failed.next;
                    state.send_modify(|state| state.failed = Some(failed));
                    next
                }
            };
            self.wait(next, &mut files, &hurry).await;
        }
    }

    async fn attempt(
        &self,
        identity: &Identity,
    ) -> Result<(Credential, Vec<CertificateDer<'static>>), String> {
        let now = (self.clock)();
        let issue = async {
            let _permit = self.permits.acquire().await;
            self.source.issue(identity, now, &self.provider).await
        };
        let issued = timeout(TIMEOUT, issue)
            .await
            .map_err(|_| format!("{}: no answer within {TIMEOUT:?}", self.source.name()))??;
        let roots = issued.roots.clone();
        let credential = Credential::verify(identity, issued, (self.clock)(), &self.provider)?;
        Ok((credential, roots))
    }

    /// Stores a certificate. Ignores a certificate that is there already, because files are read again and again.
    fn replace(
        &self,
        state: &watch::Sender<State>,
        credential: Credential,
        roots: Vec<CertificateDer<'static>>,
    ) {
        // The roots first, because the user of the certificate may meet a peer whose certificate has the same root.
        let contents = self.contents();
        state.send_if_modified(|state| {
            state.roots = roots;
            false
        });
        self.publish(&contents);
        let mut is_new = false;
        state.send_modify(|state| {
            state.failed = None;
            is_new = state.credential.as_ref().map(|old| &old.chain) != Some(&credential.chain);
            if is_new {
                let (identity, until) = (&credential.identity, Shown(credential.not_after));
                tracing::info!(
                    "certificate {} of {identity} is valid until {until}",
                    credential.serial
                );
                state.credential = Some(Arc::new(credential));
            }
        });
        if is_new {
            self.replaced.send_modify(|count| *count += 1);
        }
    }

    /// Waits until a time by the clock, and at most as long as this takes by the present clock, so that a clock that is set back
    /// causes no delay. A change of the files of certificates also ends the wait.
    async fn wait(&self, until: SystemTime, files: &mut watch::Receiver<u64>, hurry: &Notify) {
        let left = || until.duration_since((self.clock)()).unwrap_or_default();
        let deadline = Instant::now() + left();
        let has_files = matches!(self.source, Source::Directory(_));
        loop {
            let left = left().min(deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return;
            }
            tokio::select! {
                () = sleep(left.min(CLOCK)) => {}
                () = hurry.notified() => return,
                Ok(()) = files.changed(), if has_files => return,
            }
        }
    }
}

/// Logs a failure. A repeated failure is logged for debugging only: `dataplane certs` shows it.
fn report(identity: &Identity, failed: &Failure, before: Option<&Failure>) {
    let (cause, next) = (&failed.cause, Shown(failed.next));
    if before.is_some_and(|before| before.cause == *cause) {
        tracing::debug!("still no certificate of {identity}: {cause}; next attempt at {next}");
    } else {
        tracing::warn!("no certificate of {identity}: {cause}; next attempt at {next}");
    }
}

/// Returns the time until a certificate is renewed, a part of the lifetime that is left.
fn renewal(credential: &Credential, now: SystemTime) -> Duration {
    let left = credential.not_after.duration_since(now).unwrap_or_default();
    left.mul_f64(rand::random_range(RENEW_AT)).max(RENEW_MIN)
}

fn backoff(failures: u32) -> Duration {
    let full = BACKOFF.saturating_mul(1 << (failures - 1).min(10));
    full.min(BACKOFF_MAX).mul_f64(rand::random_range(0.5..1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_become_rarer_and_never_end() {
        for (failures, longest) in [
            (1, 1),
            (2, 2),
            (3, 4),
            (6, 32),
            (7, 60),
            (8, 60),
            (u32::MAX, 60),
        ] {
            let longest = Duration::from_secs(longest);
            for _ in 0..100 {
                let wait = backoff(failures);
                assert!(
                    (longest / 2..=longest).contains(&wait),
                    "{failures}: {wait:?}"
                );
            }
        }
    }
}
