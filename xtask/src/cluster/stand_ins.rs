//! Images for Kubernetes' tests: archives, or stand-ins of Debian's packages.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, bail};

use super::{
    images::{self, Image},
    programs::Programs,
};
use crate::{
    command::{check, on_path, output},
    progress,
};

/// Returns the archives of the images that the tests need: the user's, or stand-ins.
pub fn archives(programs: &Programs) -> Result<Vec<PathBuf>> {
    let given = programs.kubernetes.join("images");
    let here = if given.is_dir() {
        given
    } else {
        stand_ins(programs)?
    };
    images::archives_in(&here)
}

/// Makes stand-ins for the images once, in this user's cache.
fn stand_ins(programs: &Programs) -> Result<PathBuf> {
    // The directory's name has a version, because older stand-ins may exist.
    let kept = crate::setup::cache()?.join("cluster-images-2");
    if kept.join("done").is_file() {
        return Ok(kept);
    }
    for (program, package) in [("mmdebstrap", "mmdebstrap"), ("busybox", "busybox")] {
        if on_path(program).is_none() {
            bail!(
                "there are no images in {}/images, and {program} is missing for stand-ins: apt-get install {package}",
                programs.kubernetes.display()
            );
        }
    }
    fs::create_dir_all(&kept).with_context(|| format!("cannot create {}", kept.display()))?;
    let listed = output(Command::new(programs.kubernetes("e2e.test")).arg("--list-images"))?;
    // The name of the newest image that the tests use.
    let named = |part: &str| -> Result<String> {
        let names = listed
            .lines()
            .filter(|line| line.contains(&format!("/{part}:")));
        names
            .max()
            .map(str::to_owned)
            .with_context(|| format!("e2e.test lists no image {part}"))
    };

    let mut image = Image::new_in(&kept, "agnhost")?;
    let mut debian = Command::new("mmdebstrap");
    debian
        .args(["--variant=essential", "--mode=root"])
        .arg(
            "--include=bash,curl,netcat-openbsd,iproute2,iperf,bind9-dnsutils,bind9-host,procps,conntrack,iputils-ping,\
             net-tools,ca-certificates,wget",
        )
        .args(["doc", "man", "locale"].map(|part| format!("--dpkgopt=path-exclude=/usr/share/{part}/*")))
        .arg(debian_release()?)
        .arg(image.root());
    progress::run("making a stand-in for agnhost's image", &mut debian)?;
    check(
        Command::new("find")
            .arg(image.root().join("dev"))
            .args(["-mindepth", "1", "-delete"]),
    )?;
    let agnhost = programs.kubernetes("agnhost");
    image.program(&agnhost, "agnhost")?;
    image.program(&agnhost, "agnhost-2")?;
    // One try, as BusyBox's wget.
    image.write("etc/wgetrc", "tries = 1\n")?;
    // The image serves TLS with this certificate.
    let tls = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
    image.write("localhost.crt", &tls.cert.pem())?;
    image.write("localhost.key", &tls.signing_key.serialize_pem())?;
    image.directory("uploads")?;
    image.entrypoint = vec!["/agnhost".into()];
    image.command = vec!["pause".into()];
    image.names = vec![named("agnhost")?];
    image.names.extend(named("glibc-dns-testing"));
    image.names.extend(named("distroless-iptables"));
    image.pack()?;

    let busybox = on_path("busybox").context("busybox")?;
    let with_busybox = |name: &str| -> Result<Image> {
        let image = Image::new_in(&kept, name)?;
        image.program(&busybox, "bin/busybox")?;
        for applet in output(Command::new(&busybox).arg("--list"))?.lines() {
            let link = image.root().join("bin").join(applet);
            if !link.exists() {
                std::os::unix::fs::symlink("busybox", &link)
                    .with_context(|| format!("cannot create {}", link.display()))?;
            }
        }
        image.write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")?;
        image.write("etc/nsswitch.conf", "hosts: files dns\n")?;
        image.directory("tmp")?;
        image.directory("root")?;
        Ok(image)
    };
    let mut image = with_busybox("busybox")?;
    image.command = vec!["sh".into()];
    image.names = vec![named("busybox")?];
    image.pack()?;
    // The image serves port 80.
    let mut image = with_busybox("nginx")?;
    image.entrypoint = ["/bin/busybox", "httpd", "-f", "-p", "80", "-h", "/tmp"]
        .map(Into::into)
        .to_vec();
    image.names = listed
        .lines()
        .filter(|line| line.contains("/nginx:"))
        .map(str::to_owned)
        .collect();
    image.pack()?;
    let mut image = with_busybox("pause")?;
    image.entrypoint = ["/bin/busybox", "sleep", "2147483647"]
        .map(Into::into)
        .to_vec();
    image.names = vec![named("pause")?];
    image.pack()?;
    let regression = programs.kubernetes("regression-issue-74839");
    if regression.is_file() {
        let mut image = Image::new_in(&kept, "regression")?;
        image.program(&regression, "regression-issue-74839")?;
        image.entrypoint = vec!["/regression-issue-74839".into()];
        image.names = vec![named("regression-issue-74839")?];
        image.pack()?;
    }
    fs::write(kept.join("done"), "").context("cannot finish the images")?;
    Ok(kept)
}

/// Returns the code name of this machine's release of Debian, or bookworm.
fn debian_release() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    let of = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.map(|value| value.trim_matches('"').to_owned())
    };
    Ok(match (of("ID=").as_deref(), of("VERSION_CODENAME=")) {
        (Some("debian"), Some(name)) => name,
        _ => "bookworm".into(),
    })
}
