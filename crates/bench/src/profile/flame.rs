//! Flame graphs: stacks as boxes, each as wide as its share of the samples, callers below their
//! callees.

use super::count::SampleCounts;
use std::collections::BTreeMap;
use std::fmt::Write;

const WIDTH: f64 = 1200.0;
const ROW_HEIGHT: f64 = 17.0;
/// Boxes narrower than this are left out.
const WIDTH_MIN: f64 = 1.0;
/// Width of a character. A name is shown if three characters fit.
const CHARACTER_WIDTH: f64 = 6.6;

/// A function as called by one caller.
#[derive(Default)]
struct Frame<'a> {
    samples: u64,
    callees: BTreeMap<&'a str, Frame<'a>>,
}

impl Frame<'_> {
    fn depth(&self) -> usize {
        1 + self.callees.values().map(Frame::depth).max().unwrap_or(0)
    }
}

/// Draws the graph as SVG, for a page. A box shows its name and share under the mouse pointer.
pub(super) fn draw(counts: &SampleCounts) -> String {
    let mut root = Frame::default();
    for (stack, &samples) in &counts.stacks {
        root.samples += samples;
        let mut frame = &mut root;
        for name in stack {
            frame = frame.callees.entry(name).or_default();
            frame.samples += samples;
        }
    }
    let height = root.depth() as f64 * ROW_HEIGHT;
    let mut svg = format!("<svg class=\"flame\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n");
    if root.samples > 0 {
        let scale = WIDTH / root.samples as f64;
        boxes(&mut svg, "everything", &root, 0.0, height - ROW_HEIGHT, scale, root.samples);
    }
    svg.push_str("</svg>\n");
    svg
}

fn boxes(svg: &mut String, name: &str, frame: &Frame<'_>, x: f64, y: f64, scale: f64, all: u64) {
    let width = frame.samples as f64 * scale;
    if width < WIDTH_MIN {
        return;
    }
    let share = 100.0 * frame.samples as f64 / all as f64;
    let characters = ((width - 4.0) / CHARACTER_WIDTH) as usize;
    let shown: String =
        if characters >= 3 { name.chars().take(characters).collect() } else { String::new() };
    // Kernel symbol names contain no characters that are special in markup.
    let _ = writeln!(
        svg,
        "<g><title>{name}: {share:.1} %, {} samples</title>\
         <rect x=\"{x:.1}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"{:.0}\" \
         style=\"--warmth:{}\"/><text x=\"{:.1}\" y=\"{:.0}\">{shown}</text></g>",
        frame.samples,
        ROW_HEIGHT - 1.0,
        warmth(name),
        x + 2.0,
        y + ROW_HEIGHT - 5.0,
    );
    let mut left = x;
    for (name, callee) in &frame.callees {
        boxes(svg, name, callee, left, y - ROW_HEIGHT, scale, all);
        left += callee.samples as f64 * scale;
    }
}

/// A hue in degrees derived from the name, so that a function has the same colour everywhere.
fn warmth(name: &str) -> u32 {
    name.bytes().fold(7u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into())) % 40
}
