//! Plots of a run's figures, as SVG files that can be read on a light and on a dark page.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use plotters::prelude::*;
use serde::Deserialize;

/// A row of a run's JSON file: the fields that a plot needs.
#[derive(Clone, Debug, Deserialize)]
pub struct Figure {
    bench: String,
    path: String,
    case: String,
    services: u32,
    metric: String,
    value: f64,
}

/// A plot of one metric.
struct Plot {
    file: &'static str,
    title: &'static str,
    bench: &'static str,
    case: &'static str,
    metric: &'static str,
    kind: Kind,
}

enum Kind {
    /// A line for each path over the number of services, with logarithmic axes. The axis ends at `services`.
    Lines { services: u32 },
    /// A bar for each path.
    Bars,
}

/// The plots that docs/performance.md and README show.
const PLOTS: [Plot; 4] = [
    Plot {
        file: "connect.svg",
        title: "connect() to a ClusterIP, µs (lower is better)",
        bench: "socket",
        case: "tcp4",
        metric: "connect_p50",
        kind: Kind::Lines { services: 100_000 },
    },
    Plot {
        file: "nodeport.svg",
        title: "connect() to a node port from outside, µs (lower is better)",
        bench: "packet",
        case: "nodeport-local",
        metric: "connect_p50",
        kind: Kind::Lines { services: 100_000 },
    },
    Plot {
        file: "relay.svg",
        title: "L4 proxy on one CPU, Gbit/s (higher is better)",
        bench: "relay",
        case: "bulk-1cpu",
        metric: "gbit_per_s",
        kind: Kind::Bars,
    },
    Plot {
        file: "relay-cpu.svg",
        title: "L4 proxy on one CPU, CPU seconds per GB (lower is better)",
        bench: "relay",
        case: "bulk-1cpu",
        metric: "cpu_s_per_gb",
        kind: Kind::Bars,
    },
];

/// Paths in the order of drawing, their names, and colours that contrast with white and with black.
const PATHS: [(&str, &str, RGBColor); 11] = [
    ("dataplane", "dataplane", RGBColor(0x1f, 0x8a, 0xd2)),
    (
        "dataplane-kernel",
        "dataplane, mode: kernel",
        RGBColor(0x1f, 0x8a, 0xd2),
    ),
    ("plain", "no rules, no programs", GREY),
    ("direct", "no proxy", GREY),
    (
        "nftables",
        "kube-proxy, nftables",
        RGBColor(0x3a, 0xa0, 0x55),
    ),
    (
        "iptables-legacy",
        "kube-proxy, iptables-legacy",
        RGBColor(0xd9, 0x86, 0x1a),
    ),
    (
        "iptables-nft",
        "kube-proxy, iptables-nft",
        RGBColor(0xd6, 0x4a, 0x4a),
    ),
    ("haproxy", "HAProxy, 1 thread", RGBColor(0x3a, 0xa0, 0x55)),
    (
        "haproxy-2",
        "HAProxy, 2 threads",
        RGBColor(0x3a, 0xa0, 0x55),
    ),
    ("nginx", "nginx", RGBColor(0xd9, 0x86, 0x1a)),
    ("tokio", "tokio's copy", RGBColor(0xd6, 0x4a, 0x4a)),
];
/// The colour of axes and text.
const GREY: RGBColor = RGBColor(0x80, 0x80, 0x80);
const SIZE: (u32, u32) = (760, 380);
const FONT: (&str, i32) = ("sans-serif", 14);

/// Reads the figures of runs from files that `--json` wrote.
///
/// # Errors
///
/// Fails if a file cannot be read, or if it is not the file of a run.
pub fn read(files: &[PathBuf]) -> anyhow::Result<Vec<Figure>> {
    let mut figures = vec![];
    for file in files {
        let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let of_file: Vec<Figure> = serde_json::from_slice(&text).with_context(|| {
            let file = file.display();
            format!("{file} holds no figures of a benchmark; `cargo xtask bench NAME --json {file}` writes them")
        })?;
        figures.extend(of_file);
    }
    Ok(figures)
}

/// Draws each plot that has figures into a directory. Returns the files.
///
/// # Errors
///
/// Fails if no plot has figures, or if a file cannot be written.
pub fn draw(figures: &[Figure], directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let mut files = vec![];
    for plot in &PLOTS {
        let of_plot = |figure: &&Figure| {
            // In the benchmarks of sockets and packets, `direct` measures traffic that belongs to no service.
            let off_topic = plot.bench != "relay" && figure.path == "direct";
            let [has, wants] = [
                [&figure.bench, &figure.case, &figure.metric].map(String::as_str),
                [plot.bench, plot.case, plot.metric],
            ];
            has == wants && !off_topic
        };
        let series: Vec<Series> = PATHS
            .iter()
            .map(|(path, name, colour)| {
                let of_path = figures.iter().filter(of_plot);
                let of_path = of_path.filter(|figure| figure.path == *path);
                let points = of_path.map(|figure| (figure.services, figure.value));
                (*name, *colour, points.collect::<Vec<_>>())
            })
            .filter(|(_, _, points)| !points.is_empty())
            .collect();
        if series.is_empty() {
            continue;
        }
        let mut text = String::new();
        let drawn = match plot.kind {
            Kind::Lines { services } => lines(&mut text, plot.title, services, &series),
            Kind::Bars => bars(&mut text, plot.title, &series),
        };
        drawn.with_context(|| format!("cannot draw {}", plot.file))?;
        let path = directory.join(plot.file);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        files.push(path);
    }
    if files.is_empty() {
        let names: Vec<_> = PLOTS.iter().map(|plot| plot.bench).collect();
        bail!(
            "no figures of a plot: the plots are of {}",
            names.join(", ")
        );
    }
    Ok(files)
}

/// A line or bar: name, colour, and a value for each number of services.
type Series = (&'static str, RGBColor, Vec<(u32, f64)>);

fn lines(text: &mut String, title: &str, services: u32, series: &[Series]) -> anyhow::Result<()> {
    /// Width of the column for the names of the lines.
    const RIGHT: u32 = 200;
    /// Minimum distance between two names.
    const LINE: i32 = 18;
    let values = || {
        let all = series.iter().flat_map(|(_, _, points)| points);
        all.map(|(_, value)| *value)
    };
    let least = values().fold(f64::INFINITY, f64::min);
    let most = values().fold(0.0, f64::max);
    ensure!(least > 0.0, "a time of {least} µs is none");
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    let style = FONT.into_font().color(&GREY);
    root.draw(&Text::new(title, (10, 8), style.clone()))?;
    let shown = least / 1.3..most * 1.3;
    // The library draws a grid line for each label, even for labels outside the plot.
    let labels = [1.0, 10.0, 100.0, 1_000.0].iter();
    let labels: Vec<f64> = labels
        .flat_map(|ten| [1.0, 1.5, 2.0, 3.0, 5.0, 7.0].map(|one| one * ten))
        .filter(|value| shown.contains(value))
        .collect();
    let mut chart = ChartBuilder::on(&root)
        .margin(10)
        .margin_top(32)
        .margin_right(RIGHT)
        .x_label_area_size(44)
        .y_label_area_size(48)
        .build_cartesian_2d(
            (1.0..f64::from(services)).log_scale(),
            shown.clone().log_scale().with_key_points(labels),
        )?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(GREY.mix(0.3))
        .light_line_style(TRANSPARENT)
        .axis_style(GREY)
        .label_style(style.clone())
        .x_desc("services")
        .x_label_formatter(&|services| format!("{services}"))
        .y_label_formatter(&|value| format!("{value}"))
        .draw()?;
    let mut names = vec![];
    for (name, colour, points) in series {
        // A path without services has one value for all numbers of services.
        let everywhere = points.iter().all(|(of, _)| *of == 0);
        let points: Vec<_> = if everywhere {
            [1, services].map(|of| (f64::from(of), points[0].1)).into()
        } else {
            let points = points.iter();
            points.map(|(of, value)| (f64::from(*of), *value)).collect()
        };
        chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))?;
        if !everywhere {
            chart.draw_series(points.iter().map(|at| Circle::new(*at, 3, colour.filled())))?;
        }
        if let Some((_, value)) = points.last() {
            let (_, y) = chart.backend_coord(&(f64::from(services), *value));
            names.push((y - LINE / 2, *name, *colour));
        }
    }
    names.sort_by_key(|(y, ..)| *y);
    let mut free = 0;
    for (y, name, colour) in names {
        let y = y.max(free);
        free = y + LINE;
        let x = i32::try_from(SIZE.0 - RIGHT)? + 10;
        root.draw(&Text::new(name, (x, y), FONT.into_font().color(&colour)))?;
    }
    root.present()?;
    Ok(())
}

fn bars(text: &mut String, title: &str, series: &[Series]) -> anyhow::Result<()> {
    const HEIGHT: i32 = 26;
    const LEFT: i32 = 200;
    let most = series
        .iter()
        .map(|(_, _, points)| points[0].1)
        .fold(0.0, f64::max);
    ensure!(most > 0.0, "nothing but zeros");
    let rows = i32::try_from(series.len())?;
    let height = u32::try_from(40 + rows * (HEIGHT + 8))?;
    let root = SVGBackend::with_string(text, (SIZE.0, height)).into_drawing_area();
    let style = FONT.into_font().color(&GREY);
    let (wide, _) = SIZE;
    let width = f64::from(wide) - f64::from(LEFT) - 70.0;
    root.draw(&Text::new(title, (10, 8), style.clone()))?;
    for (row, (name, colour, points)) in (0..).zip(series) {
        let value = points[0].1;
        let top = 36 + row * (HEIGHT + 8);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "at most the picture's width"
        )]
        let right = LEFT + (width * value / most) as i32;
        let middle = top + 6;
        root.draw(&Text::new(*name, (10, middle), style.clone()))?;
        root.draw(&Rectangle::new(
            [(LEFT, top), (right, top + HEIGHT)],
            colour.filled(),
        ))?;
        let figure = crate::rows::figure(value);
        root.draw(&Text::new(figure, (right + 8, middle), style.clone()))?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(
        bench: &str,
        path: &str,
        case: &str,
        services: u32,
        metric: &str,
        value: f64,
    ) -> Figure {
        let [bench, path, case, metric] = [bench, path, case, metric].map(str::to_owned);
        Figure {
            bench,
            path,
            case,
            services,
            metric,
            value,
        }
    }

    #[test]
    fn a_line_for_each_path_and_a_bar_for_each_proxy() {
        let directory = tempfile::tempdir().unwrap();
        let mut figures = vec![figure("socket", "plain", "tcp4", 0, "connect_p50", 15.6)];
        for (services, ours, theirs) in [(1, 15.8, 21.2), (1_000, 15.8, 21.1), (10_000, 15.9, 21.0)]
        {
            figures.push(figure(
                "socket",
                "dataplane",
                "tcp4",
                services,
                "connect_p50",
                ours,
            ));
            figures.push(figure(
                "socket",
                "nftables",
                "tcp4",
                services,
                "connect_p50",
                theirs,
            ));
            // A figure of another case, which no plot shows.
            figures.push(figure(
                "socket",
                "nftables",
                "udp6",
                services,
                "connect_p50",
                1.0,
            ));
        }
        for (path, value) in [("direct", 18.9), ("dataplane", 13.4), ("haproxy", 8.5)] {
            figures.push(figure("relay", path, "bulk-1cpu", 0, "gbit_per_s", value));
        }
        let files = draw(&figures, directory.path()).unwrap();
        let names: Vec<_> = files.iter().filter_map(|file| file.file_name()).collect();
        assert_eq!(names, ["connect.svg", "relay.svg"]);
        let lines = fs::read_to_string(&files[0]).unwrap();
        for name in ["dataplane", "no rules, no programs", "kube-proxy, nftables"] {
            assert!(lines.contains(name), "{name} is missing in {lines}");
        }
        assert!(
            !lines.contains("iptables"),
            "a path without figures: {lines}"
        );
        assert_eq!(lines.matches("<circle").count(), 6, "{lines}");
        let bars = fs::read_to_string(&files[1]).unwrap();
        assert!(
            bars.contains("13.40") && bars.contains("HAProxy, 1 thread"),
            "{bars}"
        );
    }

    #[test]
    fn figures_of_nothing_that_is_plotted() {
        let directory = tempfile::tempdir().unwrap();
        let none = [figure("sync", "dataplane", "api", 1, "full_sync_s", 1.0)];
        let error = draw(&none, directory.path()).unwrap_err().to_string();
        assert!(
            error.contains("socket") && error.contains("relay"),
            "{error}"
        );
        let file = directory.path().join("other.json");
        fs::write(&file, "{}").unwrap();
        let error = read(&[file]).unwrap_err().to_string();
        assert!(
            error.contains("other.json") && error.contains("--json"),
            "{error}"
        );
    }
}
