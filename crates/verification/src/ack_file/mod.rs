//! Ack files: an agent confirms receipt by writing a file below its working directory. [`AckFile`] is the file that is
//! expected, [`AckFile::judge`] decides about one that is there.
//!
//! Watching, opening without following links, ownership and removal are the caller's work.

mod name;

use serde_json::{Map, Value};

pub use name::{folder_name, is_plain_file_name};

/// Largest ack file. The object that is asked for takes about 150 bytes; the rest is room for further keys. Our choice.
pub const MAX_ACK_FILE_BYTES: usize = 4096;

/// The only status that acknowledges.
const RECEIVED: &str = "received";

/// The ack file that is expected for one delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AckFile {
    path: Option<String>,
    delivery_id: String,
    event_id: String,
}

/// Reason to refuse an ack file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AckFileRejection {
    /// Another path than the expected one, including suffixes and temporary names.
    Path,
    /// More than [`MAX_ACK_FILE_BYTES`].
    TooLarge,
    /// Empty or not JSON yet. To be judged again at the next change, until the attempt ends.
    Incomplete,
    /// JSON, but no object.
    Shape,
    /// `delivery_id` is missing or another one.
    DeliveryId,
    /// `event_id` is missing or another one.
    EventId,
    /// `status` is anything but `received`.
    Status,
}

impl AckFileRejection {
    /// The word for the reason in answers, logs and figures.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::TooLarge => "too_large",
            Self::Incomplete => "incomplete",
            Self::Shape => "shape",
            Self::DeliveryId => "delivery_id",
            Self::EventId => "event_id",
            Self::Status => "status",
        }
    }
}

impl AckFile {
    /// Describes the ack file by which `agent` confirms a delivery.
    pub fn new(agent: &str, delivery_id: &str, event_id: &str) -> Self {
        let path = is_plain_file_name(delivery_id).then(|| format!("{}/{delivery_id}", acks_folder(agent)));
        Self { path, delivery_id: delivery_id.to_owned(), event_id: event_id.to_owned() }
    }

    /// Returns the path of the file relative to the agent's working directory. `None` if the delivery id is no plain
    /// file name: then the file channel cannot work for this delivery.
    pub fn path(&self) -> Option<&str> {
        self.path.as_deref()
    }

    /// Decides about a file at `path`, relative to the agent's working directory, with the given content. The content
    /// may be cut off after more than [`MAX_ACK_FILE_BYTES`]. The first rule that is violated names the reason.
    pub fn judge(&self, path: &str, content: &[u8]) -> Result<(), AckFileRejection> {
        if self.path.as_deref() != Some(path) {
            return Err(AckFileRejection::Path);
        }
        if content.len() > MAX_ACK_FILE_BYTES {
            return Err(AckFileRejection::TooLarge);
        }
        let value: Value = serde_json::from_slice(content).map_err(|_| AckFileRejection::Incomplete)?;
        let Value::Object(fields) = value else { return Err(AckFileRejection::Shape) };
        for (key, expected, rejection) in [
            ("delivery_id", self.delivery_id.as_str(), AckFileRejection::DeliveryId),
            ("event_id", self.event_id.as_str(), AckFileRejection::EventId),
            ("status", RECEIVED, AckFileRejection::Status),
        ] {
            if text_field(&fields, key) != Some(expected) {
                return Err(rejection);
            }
        }
        Ok(())
    }
}

/// Returns the folder of an agent's ack files, relative to its working directory.
pub fn acks_folder(agent: &str) -> String {
    format!(".agent-relay/{}/acks", folder_name(agent))
}

fn text_field<'a>(fields: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    fields.get(key)?.as_str()
}

#[cfg(test)]
mod tests;
