//! Errors of reading JSON that show nothing of its content.

/// Describes an error of reading JSON without the value that was found: it may be a secret, or large.
pub(crate) fn unreadable(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let problems = ["invalid type: ", "invalid value: ", "unknown variant", "unknown field"];
    let shown = problems.into_iter().find_map(|problem| {
        let found = text.strip_prefix(problem)?;
        // From the end: the value itself may contain these words.
        let (found, expected) = found.rsplit_once(", expected ")?;
        // The first word is the type of a value, or begins with its delimiter.
        let kind = found.split(' ').next().filter(|kind| kind.bytes().all(|byte| byte.is_ascii_lowercase()));
        Some(format!("{problem}{}, expected {expected}", kind.unwrap_or_default()))
    });
    shown.unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Word {
        One,
    }

    #[test]
    fn a_value_that_cannot_be_read_is_not_shown() {
        let told = |error: serde_json::Error| unreadable(&error);
        let number = |value| told(serde_json::from_value::<u16>(value).expect_err("no number"));
        assert_eq!(number(json!("secret, expected secret")), "invalid type: string, expected u16");
        assert_eq!(number(json!(77_777)), "invalid value: integer, expected u16");
        assert_eq!(number(json!(["secret"])), "invalid type: sequence, expected u16");
        let word = told(serde_json::from_str::<Word>("\"secret\"").expect_err("no word"));
        assert_eq!(word, "unknown variant, expected `one` at line 1 column 8");
        let one = serde_json::from_str::<Word>("\"one\"").expect("the word");
        assert!(matches!(one, Word::One));
    }
}
