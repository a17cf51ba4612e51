//! Text for a terminal. Invariant: what others wrote into their objects, and what servers answered, moves no cursor and changes
//! no title: control characters are shown and not sent.

use std::borrow::Cow;

/// Returns the text with its control characters escaped, but for line breaks and tabs.
pub fn plain(text: &str) -> Cow<'_, str> {
    let moves = |character: char| character.is_control() && !matches!(character, '\n' | '\t');
    if !text.contains(moves) {
        return text.into();
    }
    let shown = text.chars().map(|character| match moves(character) {
        true => character.escape_default().to_string(),
        false => character.to_string(),
    });
    shown.collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_others_are_shown_and_not_sent() {
        let hostile = "a\tb\n\x1b]0;title\x07 \u{9b}2J\r\x08 ä";
        assert_eq!(plain(hostile), "a\tb\n\\u{1b}]0;title\\u{7} \\u{9b}2J\\r\\u{8} ä");
        assert!(matches!(plain("ä\n"), Cow::Borrowed(_)));
    }
}
