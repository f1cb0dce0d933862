//! Notices to senders whose message found a full mailbox.

use std::collections::HashMap;

use relay_domain::events::kind;
use relay_store::{
    channels::audience::Audience,
    messages::batch::{NewRecipient, NewSend},
};
use relay_wire::{events::data::DeliveryRefused, field::ToValue as _};

use super::Sender;
use crate::{hints::AgentNotices, messages::Messages};

impl Messages {
    /// Notifies the sender of full mailboxes (docs/protocol/node.md, "Expiry and mailbox depth"). The send itself
    /// succeeded.
    pub(super) fn notify_mailbox_full(&self, sender: &Sender, send: &NewSend, audience: &Audience, full: &[usize]) {
        metrics::counter!(relay_domain::metric_names::DELIVERIES_REFUSED).increment(full.len() as u64);
        let names: HashMap<_, _> = audience.members.iter().map(|m| (m.agent_id, m.name.as_str())).collect();
        let notice = |recipient: &NewRecipient| {
            DeliveryRefused {
                // A full mailbox gets no row, so there is no delivery.
                delivery_id: None,
                message_id: send.message.id,
                target_agent_id: recipient.agent_id,
                target_agent_name: names.get(&recipient.agent_id).copied(),
                reason: "depth_cap",
                error: "mailbox depth cap exceeded",
                retryable: false,
            }
            .to_value()
        };
        let each = full.iter().filter_map(|position| send.recipients.get(*position)).map(notice).collect();
        let (scope, agent) = (sender.scope, sender.agent_id);
        self.core.notify_senders(vec![AgentNotices { scope, agent, event: kind::DELIVERY_FAILED, each }]);
    }
}
