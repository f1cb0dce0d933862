//! Seqs at http_push endpoints through a failover that loses deliveries.

use std::time::Duration;

use anyhow::{Result, ensure};
use relay_testkit::wait;

use super::failover_push::{RECIPIENT, lose_pushed_messages};

const SOON: Duration = Duration::from_secs(60);
/// A recovery that cannot read the log raises all numbers by this margin, and would hide a repeated one.
const MARGIN: u64 = 10_000;

/// Only the worker knows the numbers of the lost deliveries. It serves other mailboxes by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_gets_no_seq_with_two_messages() -> Result<()> {
    let fault = "primary killed, the standby lags and NATS was unavailable, http_push, the mailbox released before";
    let installation = lose_pushed_messages(fault, async |scene| {
        // The worker releases an idle mailbox after 2 s.
        let owned = "UPDATE push_mailboxes SET due_at = due_at WHERE owner IS NOT NULL";
        wait::until("the mailbox to be released", SOON, || async {
            scene.database.execute(owned).await.is_ok_and(|owned| owned == 0)
        })
        .await;
        Ok(())
    })
    .await?;
    let at = installation.scene.database.mailbox_position(RECIPIENT).await?;
    ensure!(at.head < MARGIN, "{at:?}");
    Ok(())
}
