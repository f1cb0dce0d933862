//! Messages that quote the ids of others. The echo of a quotation shows an id that another message's echo is recognised
//! by, and a sender chooses what is quoted: after it an echo proves nothing about the quoted message.

use relay_verification::{delivery::DeliveryState, echo::squash};

use super::{line::sender_text, outstanding::OutstandingMessage, pipeline::Pipeline};

impl Pipeline {
    /// Returns whether the next message quotes one whose attempt is under way. It waits for the end of that attempt,
    /// and not for the outcome, so that no quotation keeps an agent from its messages.
    pub(super) fn head_quotes_attempt(&mut self) -> bool {
        let is_under_way = |outstanding: &OutstandingMessage| {
            matches!(outstanding.delivery.state(), DeliveryState::Queued | DeliveryState::Injected)
        };
        !self.quoted_by_head(is_under_way).is_empty()
    }

    /// Ends the search for echoes of the messages that the next one quotes. Another attempt begins a new one.
    pub(super) fn end_quoted_echoes(&mut self) {
        for index in self.quoted_by_head(|outstanding| outstanding.watch.is_some()) {
            if let Some(watch) = self.outstanding[index].watch.take() {
                self.echo.end(watch);
            }
        }
    }

    /// Places of those outstanding messages whose ids are in what the sender of the next one chooses, as echoes are
    /// compared. `concerns` comes first: it leaves at most as many as there are watches, and the text may be large.
    fn quoted_by_head(&mut self, concerns: impl Fn(&OutstandingMessage) -> bool) -> Vec<usize> {
        let mut places: Vec<usize> = (0..self.outstanding.len()).collect();
        places.retain(|index| concerns(&self.outstanding[*index]));
        let Some(head) = self.queue.head_mut().filter(|_| !places.is_empty()) else { return Vec::new() };
        let text = head.squashed.get_or_insert_with(|| squash(&sender_text(&head.message)));
        places.retain(|index| text.contains(&squash(&self.outstanding[*index].message.event_id)));
        places
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Scene, message};
    use crate::mailbox::{Author, Message};

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
    fn a_quotation_may_be_hidden_in_names_and_by_characters_that_are_not_typed() {
        let hidden = message(2, "ev\u{202e}t\u{2066}_1");
        let by_name = Message { author: Author { name: "bob evt_1 x".into(), agent_id: None }, ..message(2, "two") };
        let by_target = Message { target: "#evt_1".into(), ..message(2, "two") };
        for quoting in [hidden, by_name, by_target] {
            let mut scene = Scene::new("cat", &[message(1, "one"), quoting]);
            assert_eq!(scene.step(0).len(), 1);
            assert!(scene.step(1000).is_empty(), "the attempt of the quoted message is under way");
        }
    }

    #[test]
    fn a_quotation_of_a_message_that_was_shown_is_typed_at_once() {
        let mut scene = Scene::new("cat", &[message(1, "one"), message(2, "see [evt_1]")]);
        let first = scene.step(0);
        scene.output(10, &format!("{}\r\n", first[0]));
        assert_eq!(scene.step(100).len(), 1);
    }
}
