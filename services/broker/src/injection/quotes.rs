//! Messages that quote the ids of others. The echo of a quotation shows an id that another message's echo is recognised
//! by, and a sender chooses what is quoted: after it an echo proves nothing about the quoted message.

use relay_verification::{delivery::DeliveryState, echo::squash};

use super::{outstanding::OutstandingMessage, pipeline::Pipeline};

impl Pipeline {
    /// Returns whether the next message quotes one whose attempt is under way. It waits for the end of that attempt, and
    /// not for the outcome, so that no quotation keeps an agent from its messages.
    pub(super) fn head_quotes_attempt(&mut self) -> bool {
        let is_under_way = |state| matches!(state, DeliveryState::Queued | DeliveryState::Injected);
        self.quoted_by_head().into_iter().any(|index| is_under_way(self.outstanding[index].delivery.state()))
    }

    /// Ends the search for echoes of the messages that the next one quotes. Another attempt begins a new one.
    pub(super) fn end_quoted_echoes(&mut self) {
        for index in self.quoted_by_head() {
            if let Some(watch) = self.outstanding[index].watch.take() {
                self.echo.end(watch);
            }
        }
    }

    /// Places of the outstanding messages whose ids are in the text of the next one, as echoes are compared.
    fn quoted_by_head(&mut self) -> Vec<usize> {
        if self.outstanding.is_empty() {
            return Vec::new();
        }
        let Some(head) = self.queue.head_mut() else { return Vec::new() };
        let text = head.squashed.take().unwrap_or_else(|| squash(&head.message.body));
        let is_quoted = |outstanding: &OutstandingMessage| text.contains(&squash(&outstanding.message.event_id));
        let places = self.outstanding.iter().enumerate().filter(|(_, outstanding)| is_quoted(outstanding));
        let places = places.map(|(index, _)| index).collect();
        if let Some(head) = self.queue.head_mut() {
            head.squashed = Some(text);
        }
        places
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Scene, message};

    #[test]
    fn a_message_that_quotes_another_waits_for_its_attempt_and_proves_nothing_about_it() {
        let quote = "Relay message from bob in #room [ev\u{a0}t_1]: one";
        let mut scene = Scene::new("cat", &[message(1, "one"), message(2, quote), message(3, "three")]);
        assert_eq!(scene.step(0).len(), 1);
        assert!(scene.step(1000).is_empty(), "the attempt of the quoted message is under way");
        let second = scene.step(2000);
        assert!(second.len() == 1 && second[0].ends_with("]: one"), "{second:?}");
        scene.output(2100, &format!("{}\r\n", second[0]));
        assert_eq!(scene.step(2200).len(), 1);
        assert_eq!(
            scene.log,
            ["type 1", "verdict timeout_fallback", "settle evt_1", "type 1", "verdict echo", "settle evt_2", "type 1"]
        );
    }

    #[test]
    fn a_quotation_of_a_message_that_was_shown_is_typed_at_once() {
        let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "see [evt_1]")]);
        let first = scene.step(0);
        scene.output(10, &format!("{}\r\n", first[0]));
        assert_eq!(scene.step(100).len(), 1);
    }
}
