//! The limit of a tunnel's CPU time: what encryption and relaying cost alone.

use std::{hint::black_box, thread, time::Duration};

use anyhow::{Context as _, anyhow};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::{
    rows::{Rounds, Row, find},
    stats::median,
};

/// The payload of a TLS record, in bytes.
const RECORD: usize = 16 << 10;
/// The payload that is encrypted and decrypted, in bytes.
const BYTES: usize = 1 << 30;
const METRIC: (&str, &str) = ("cpu_s_per_gb", "s/GB");

/// Returns the CPU time in seconds in which `ring` encrypts and decrypts a GB, record by record, on one CPU.
///
/// The suite is the one that two agents choose: AES-128-GCM. A record stays in the CPU's caches, and nothing is copied.
///
/// # Errors
/// Fails if the kernel does not have the clock, or the library refuses.
pub fn crypto(divisor: u32) -> anyhow::Result<f64> {
    let records = BYTES / RECORD / usize::try_from(divisor)?;
    // A thread of its own: children inherit the affinity of this one.
    let measured = thread::spawn(move || seal_and_open(records)).join();
    measured.map_err(|_| anyhow!("encryption panicked"))?
}

fn seal_and_open(records: usize) -> anyhow::Result<f64> {
    let mut set = CpuSet::new();
    set.set(thread::available_parallelism()?.get() - 1)?;
    sched_setaffinity(Pid::from_raw(0), &set)?;
    let key = UnboundKey::new(&AES_128_GCM, &[7; 16])
        .ok()
        .context("a key")?;
    let key = LessSafeKey::new(key);
    let mut record = vec![1; RECORD];
    let start = cpu()?;
    for number in 0..u64::try_from(records)? {
        let nonce = || {
            let mut bytes = [0; NONCE_LEN];
            bytes[NONCE_LEN - 8..].copy_from_slice(&number.to_be_bytes());
            Nonce::assume_unique_for_key(bytes)
        };
        let tag = key
            .seal_in_place_separate_tag(nonce(), Aad::empty(), &mut record)
            .ok()
            .context("a record that cannot be encrypted")?;
        record.extend_from_slice(tag.as_ref());
        let opened = key
            .open_in_place(nonce(), Aad::empty(), &mut record)
            .ok()
            .context("a record that cannot be decrypted")?;
        black_box(opened);
        record.truncate(RECORD);
    }
    #[expect(clippy::cast_precision_loss, reason = "below 2^52")]
    let bytes = (records * RECORD) as f64;
    Ok((cpu()? - start) / bytes * 1e9)
}

/// Returns the CPU time of this thread, in seconds.
fn cpu() -> anyhow::Result<f64> {
    let used = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
    Ok(Duration::from(used).as_secs_f64())
}

/// Returns the rows of encryption, of the limit, and of the tunnels' distance to it. The limit is encryption, and relaying
/// plaintext twice: a tunnel has two ends, each of which reads one socket and writes another.
pub fn rows(rows: &[Row], of_crypto: Rounds) -> Vec<Row> {
    let row = |path, case, metric, rounds| Row::new("relay", path, case, metric, rounds);
    let crypto = median(&mut of_crypto.concat());
    let mut made = vec![row("aes-128-gcm", "bulk-1cpu", METRIC, of_crypto)];
    for case in ["bulk", "bulk-1cpu"] {
        let Some(relayed) = find(rows, "dataplane", 0, case, METRIC.0) else {
            continue;
        };
        let limit = |costs: &Vec<f64>| costs.iter().map(|cost| crypto + 2.0 * cost).collect();
        let limits: Rounds = relayed.rounds.iter().map(limit).collect();
        for path in ["hbone", "ztunnel"] {
            if let Some(tunnel) = find(rows, path, 0, case, METRIC.0) {
                let over = |(costs, limits): (&Vec<f64>, &Vec<f64>)| -> Vec<f64> {
                    let pairs = costs.iter().zip(limits);
                    pairs.map(|(cost, limit)| cost / limit).collect()
                };
                let ratios = tunnel.rounds.iter().zip(&limits).map(over).collect();
                made.push(row(path, case, ("cpu_over_limit", "×"), ratios));
            }
        }
        made.push(row("limit", case, METRIC, limits));
    }
    made
}
