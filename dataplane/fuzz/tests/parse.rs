//! The parser and the header views against arbitrary frames.

use skein_dataplane_fuzz::{parse_target, run};

#[test]
fn parse() {
    run("parse", parse_target::check);
}
