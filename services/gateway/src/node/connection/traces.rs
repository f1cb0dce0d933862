//! Traces of deliveries on one connection: the span of a frame, and the span of its ack below it.

use std::collections::VecDeque;

use relay_domain::mailboxes::stream::Seq;

/// Traced frames whose acks are awaited; the trace of further ones ends with the frame.
const MAX_TRACED_FRAMES: usize = 64;

/// Traced frames of one agent without an ack.
#[derive(Debug, Default)]
pub(super) struct DeliveryTraces {
    /// Seq and trace context, oldest first.
    frames: VecDeque<(Seq, String)>,
}

impl DeliveryTraces {
    /// Writes a frame inside a span below `traceparent`, and remembers the span until the ack.
    pub(super) fn in_delivery_span(
        &mut self,
        seq: Seq,
        delivery_id: Option<&str>,
        traceparent: &str,
        write: impl FnOnce(),
    ) {
        let span = tracing::info_span!("node.deliver", delivery.seq = seq, delivery.id = delivery_id);
        relay_trace::set_parent(&span, traceparent);
        let _entered = span.enter();
        write();
        if self.frames.len() < MAX_TRACED_FRAMES
            && let Some(sent) = relay_trace::current_traceparent()
        {
            self.frames.push_back((seq, sent));
        }
    }

    /// Ends the traces of frames up to `floor` with an empty span, which marks the time of the ack.
    pub(super) fn on_ack(&mut self, floor: Seq) {
        while let Some((_, sent)) = self.frames.pop_front_if(|(seq, _)| *seq <= floor) {
            let span = tracing::info_span!("node.ack", delivery.up_to_seq = floor);
            relay_trace::set_parent(&span, &sent);
            span.in_scope(|| {});
        }
    }
}
