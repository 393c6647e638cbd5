//! The pipeline against arbitrary frames, from a pod and from the wire.

use skein_dataplane_fuzz::{pipeline_target, run};

#[test]
fn pipeline() {
    run("pipeline", pipeline_target::check);
}
