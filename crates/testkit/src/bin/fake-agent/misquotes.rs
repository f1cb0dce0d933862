//! Output that resembles a message without showing it.

const HEADER: &str = "Relay message from ";

/// Returns lines with the parts of a message: other ids in front of its text, the beginning of its id, its id split by
/// another line or hidden in a word, and the whole message in the title of the window. None shows its id as a word of
/// its own, so none proves that the program has the message.
pub(crate) fn misquotes(text: &str) -> String {
    let Some((sender, id, body)) = parts(text) else { return String::new() };
    let body = body.replace('\n', " ");
    let (first, last) = id.split_at(id.len() / 2);
    let under = |id: &str| format!("{HEADER}{sender} [{id}]: {body}");
    let lines = [
        under(&format!("{id}0")),
        under(&format!("0{id}")),
        under(&format!("{id}-2")),
        under(first),
        under(&format!("{first}\r\n12:00:01 INFO tick\r\n{last}")),
        format!("seen{id}before {sender} {body}"),
        format!("\x1b]0;{}\x07", under(id)),
    ];
    lines.map(|line| line + "\r\n").concat()
}

/// Returns lines with the header of an earlier message: in front of another text, alone, and cut off. None shows a word
/// of the message itself.
pub(crate) fn earlier_headers(earlier: &str) -> String {
    let Some((sender, id, _)) = parts(earlier) else { return String::new() };
    let cut = &id[..id.len() - 1];
    let lines = [
        format!("{HEADER}{sender} [{id}]: printed by the program"),
        format!("{HEADER}{sender} [{id}]:"),
        format!("{sender} has sent {id} before"),
        format!("{HEADER}{sender} [{cut}]: printed by the program"),
    ];
    lines.map(|line| line + "\r\n").concat()
}

/// Sender, id and body of the message in a submitted text. Ids are ASCII.
fn parts(text: &str) -> Option<(&str, &str, &str)> {
    let (_, message) = text.split_once(HEADER)?;
    let (sender, rest) = message.split_once(" [")?;
    let (id, body) = rest.split_once("]: ")?;
    id.is_ascii().then_some((sender, id, body))
}
