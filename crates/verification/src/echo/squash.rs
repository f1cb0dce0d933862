//! [`squash`]: text without everything that wrapping, borders and prompts of terminal programs add or remove.

/// Removes white space, control characters, box drawing and block characters (U+2500 to U+259F), braille
/// (U+2800 to U+28FF, spinners), and `|`, `>`, `❯` and `›` (borders and prompts). Case is kept.
///
/// Applied to the output and to everything it is compared with, so that hard wraps at any column, frames, prompts,
/// spinners in mid-word, indentation and tabs do not matter. The set is our choice, taken from the layouts of
/// common agent programs.
pub fn squash(text: &str) -> String {
    text.chars().filter(|character| is_kept(*character)).collect()
}

/// Returns `true` if `character` survives [`squash`].
pub(super) fn is_kept(character: char) -> bool {
    if character.is_ascii() {
        return character.is_ascii_graphic() && !matches!(character, '|' | '>');
    }
    !(character.is_whitespace()
        || character.is_control()
        || matches!(character, '\u{2500}'..='\u{259F}' | '\u{2800}'..='\u{28FF}' | '\u{276F}' | '\u{203A}'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_vanishes_and_text_stays() {
        assert_eq!(squash("│ ❯ Hel\u{00A0}lo,\t\r\n│ ⠋wor\u{2028}ld › |>█\u{7f}\u{1}"), "Hello,world");
        assert_eq!(squash("Ünï-cødé_日本 \u{3000}✓•"), "Ünï-cødé_日本✓•");
    }
}
