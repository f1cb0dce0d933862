//! Reports of agents about themselves, with secrets of their own: results and acks. Deliveries that failed.

use std::sync::Arc;

use axum::{
    Json,
    http::{HeaderMap, StatusCode},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    access::secret,
    error::{ApiError, ApiResult},
    extract::{Body, Path, Ready},
};
use crate::{
    agents::{AgentCommand, AgentError, ResultSchema},
    api::types::Event,
    injection::AckAnswer,
};

/// Largest structured result, and largest metadata of one.
const MAX_RESULT: usize = 1 << 20;
/// Statuses with which an ack confirms. `received` is that of ack files; agents use the other two with the ack tools of
/// engines. Any other is refused, since an ack with it is no confirmation.
const CONFIRMING: [&str; 3] = ["received", "accepted", "delivered"];

#[derive(Debug, Deserialize)]
struct AckBody {
    #[serde(default, alias = "deliveryId")]
    delivery_id: Option<String>,
    #[serde(default, alias = "eventId")]
    event_id: Option<String>,
    #[serde(default)]
    status: Option<String>,
}

/// `POST /api/delivery-ack`
pub(super) async fn ack(ready: Ready, headers: HeaderMap, body: Body) -> ApiResult<Json<Value>> {
    let token = secret(&headers, "x-agent-ack-token").unwrap_or_default();
    let agent = ready.services.agents.find_by_secret(token, |agent| &agent.ack_token).ok_or_else(unauthorized)?;
    let AckBody { delivery_id, event_id, status } = body.parse()?;
    if delivery_id.is_none() && event_id.is_none() {
        return Err(ApiError::invalid("delivery_id or event_id is needed"));
    }
    if status.is_some_and(|status| !CONFIRMING.contains(&status.as_str())) {
        return Err(ApiError::invalid("status must be received, accepted or delivered"));
    }
    match agent.ask(|reply| AgentCommand::Ack { delivery_id, event_id, reply }).await? {
        AckAnswer::Accepted => Ok(Json(json!({ "success": true, "level": "L2", "method": "mcp" }))),
        AckAnswer::NotFound => {
            Err(ApiError::new(StatusCode::NOT_FOUND, "delivery_not_found", "no such delivery is outstanding"))
        }
        AckAnswer::Failed => Err(ApiError::new(StatusCode::CONFLICT, "delivery_failed", "the delivery has failed")),
    }
}

#[derive(Debug, Deserialize)]
struct ResultBody {
    // Two options: null is a result, and an absent key is not.
    #[serde(default, deserialize_with = "relay_wire::field::present")]
    data: Option<Option<Value>>,
    #[serde(default)]
    r#final: Option<bool>,
    #[serde(default)]
    metadata: Value,
    #[serde(default, alias = "agent")]
    name: Option<String>,
}

/// `POST /api/agent-result`
pub(super) async fn result(ready: Ready, headers: HeaderMap, body: Body) -> ApiResult<Json<Value>> {
    let token = secret(&headers, "x-agent-result-token").unwrap_or_default();
    let agent = ready.services.agents.find_by_secret(token, |agent| &agent.result_token);
    let agent = agent.ok_or_else(|| unauthorized().flagged())?;
    let name = agent.spec.name.clone();
    let flagged = |error: ApiError| error.flagged_with("name", &name);
    let body: ResultBody = body.parse().map_err(flagged)?;
    // The secret is that of another agent than the one named.
    if body.name.is_some_and(|given| given != name) {
        return Err(flagged(unauthorized()));
    }
    let data = body.data.ok_or_else(|| flagged(ApiError::invalid("data is needed")))?.unwrap_or(Value::Null);
    if [&data, &body.metadata].iter().any(|part| part.to_string().len() > MAX_RESULT) {
        let message = "a result or its metadata is above 1 MiB";
        let error = ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", message);
        return Err(flagged(error));
    }
    let data = check_result(agent.result_schema, data).await.map_err(flagged)?;
    let result_id = format!("ar_{}", uuid::Uuid::new_v4().simple());
    let event = Event::AgentResult {
        result_id: result_id.clone(),
        data,
        r#final: body.r#final.unwrap_or(true),
        metadata: body.metadata,
    };
    ready.services.hub.publish(&name, &event);
    Ok(Json(json!({ "success": true, "name": name, "result_id": result_id })))
}

/// Checks a result on a thread of its own: the schema and the data decide about the time that it takes.
async fn check_result(schema: Option<Arc<ResultSchema>>, data: Value) -> ApiResult<Value> {
    let Some(schema) = schema else { return Ok(data) };
    let checked = tokio::task::spawn_blocking(move || schema.check(&data).map(|()| data)).await;
    let checked = checked.map_err(|error| AgentError::State(error.to_string()))?;
    checked.map_err(|fault| ApiError::new(StatusCode::BAD_REQUEST, "schema_mismatch", fault))
}

/// `GET /api/dead-letters`: the last failures, oldest first.
pub(super) async fn dead_letters(ready: Ready) -> Json<Value> {
    Json(json!({ "success": true, "dead_letters": ready.services.dead_letters.list() }))
}

/// `POST /api/dead-letters/{delivery_id}/redeliver`: types a failed message again, under its own ids.
pub(super) async fn redeliver(ready: Ready, Path(delivery_id): Path<String>) -> ApiResult<Json<Value>> {
    let letters = &ready.services.dead_letters;
    let unknown =
        || ApiError::new(StatusCode::NOT_FOUND, "delivery_not_found", "no failed delivery of that id is remembered");
    let name = letters.agent_name(&delivery_id).ok_or_else(unknown)?;
    let agent = ready.services.agents.get(&name)?;
    // The agent's task takes the letter: of several calls at once one gets it, and an agent that ends meanwhile leaves
    // it for another call.
    let id = delivery_id.clone();
    if !agent.ask(|reply| AgentCommand::Redeliver { delivery_id: id, reply }).await? {
        return Err(unknown());
    }
    Ok(Json(json!({ "success": true, "delivery_id": delivery_id, "name": name })))
}

fn unauthorized() -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", "the agent's token is missing or wrong")
}
