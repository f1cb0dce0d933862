//! Direct-message conversations: listing, reading, groups and who takes part. Posting is in `send`.

use axum::{
    extract::State,
    http::{HeaderMap, StatusCode},
};
use relay_domain::conversation::public_channel_id;
use relay_engine::{
    Engine,
    dms::{CreateGroup, CreatedGroup, ListedConversation},
};
use relay_wire::{dm as wire, field::Timestamp, message::PageQuery};
use serde_json::{Value, json};

use crate::{
    caller::{ActingAgent, Agent},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, KeyedBody, Path, Query},
    routes::page,
};

/// `GET /v1/dm/conversations`: the caller's own, the liveliest first.
#[tracing::instrument(level = "debug", name = "http.dms.conversations", skip_all)]
pub async fn conversations(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    headers: HeaderMap,
) -> Result<Reply<Vec<wire::Conversation>>, ApiError> {
    // The one client that validates these fields as strings.
    let names_only = headers.get("x-relaycast-origin-client").is_some_and(|client| client == "@relaycast/python-sdk");
    let listed = engine.conversations(&caller).await?;
    Ok(Reply::ok(listed.into_iter().map(|row| conversation(row, names_only)).collect()))
}

/// `GET /v1/dm/:conversation_id/messages`: newest first.
#[tracing::instrument(level = "debug", name = "http.dms.messages", skip_all)]
pub async fn messages(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
    Query(query): Query<PageQuery>,
) -> Result<Reply<Vec<Value>>, ApiError> {
    Ok(Reply::ok(engine.conversation_messages(&caller, &id, page::messages(&query)?).await?))
}

/// `POST /v1/dm/group`.
#[tracing::instrument(level = "debug", name = "http.dms.create_group", skip_all)]
pub async fn create_group(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    KeyedBody { body, key }: KeyedBody<wire::CreateGroupBody>,
) -> Result<Reply<Value>, ApiError> {
    let request = CreateGroup { participants: body.participants, title: body.name, text: body.text };
    match engine.create_group(&caller, &request, key.as_ref()).await? {
        CreatedGroup::Made(data) => Ok(Reply::created(data)),
        CreatedGroup::Replayed(replay) => {
            let status = StatusCode::from_u16(replay.status).unwrap_or(StatusCode::CREATED);
            Ok(Reply::with_status(status, replay.data).replayed(true))
        }
    }
}

/// `POST /v1/dm/:id/participants`.
#[tracing::instrument(level = "debug", name = "http.dms.add_participant", skip_all)]
pub async fn add_participant(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(id): Path<String>,
    Body(body): Body<wire::AddParticipantBody>,
) -> Result<Reply<wire::AddedParticipant>, ApiError> {
    let already_member = engine.add_participant(&caller, &id, &body.agent_name).await?;
    Ok(Reply::ok(wire::AddedParticipant { conversation_id: id, agent: body.agent_name, already_member }))
}

/// `DELETE /v1/dm/:id/participants/:name`.
#[tracing::instrument(level = "debug", name = "http.dms.remove_participant", skip_all)]
pub async fn remove_participant(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path((id, name)): Path<(String, String)>,
) -> Result<NoContent, ApiError> {
    engine.remove_participant(&caller, &id, &name).await?;
    Ok(NoContent)
}

fn conversation(row: ListedConversation, names_only: bool) -> wire::Conversation {
    let participants = row
        .participant_ids
        .iter()
        .zip(&row.participant_names)
        .map(
            |(id, name)| {
                if names_only { json!(name) } else { json!({ "agent_id": id.to_string(), "agent_name": name }) }
            },
        )
        .collect();
    let last_message = row.last_message_id.map(|id| {
        if names_only {
            return json!(row.last_text);
        }
        json!({
            "id": id.to_string(),
            "text": row.last_text,
            "agent_id": row.last_agent_id.map(|id| id.to_string()),
            "agent_name": row.last_agent_name,
            "agent_type": row.last_agent_type,
            "created_at": row.last_created_at.map(|at| Timestamp(at).to_string()),
        })
    });
    let own = row.conversation;
    wire::Conversation {
        channel_id: public_channel_id(&own.conversation_id).unwrap_or_else(|| own.channel_id.to_string()),
        id: own.conversation_id,
        kind: if own.channel_type == 1 { "1:1" } else { "group" },
        name: own.title,
        participants,
        last_message,
        unread_count: row.unread_count,
        created_at: own.created_at.into(),
    }
}
