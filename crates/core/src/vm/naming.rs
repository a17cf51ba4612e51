//! The naming template of a machine: the part of Go's text templates that CAPV's own examples use.
//!
//! The data is `.machine.name`. There are if, else and end, parentheses, pipes, the comparisons eq, ne, lt, le, gt, ge, the words
//! and, or, not, the function len, and the functions trunc, trimSuffix and lower.

/// The most levels of parentheses and ifs. A template comes from a user, and each level takes a part of the stack.
const DEEPEST: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Text(String),
    Number(i64),
    Truth(bool),
}

impl Value {
    fn is_true(&self) -> bool {
        match self {
            Self::Text(text) => !text.is_empty(),
            Self::Number(number) => *number != 0,
            Self::Truth(truth) => *truth,
        }
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Number(number) => write!(f, "{number}"),
            Self::Truth(truth) => write!(f, "{truth}"),
        }
    }
}

/// Returns what a template makes of the name of a Machine; else what is wrong with the template.
pub fn fill(template: &str, machine: &str) -> Result<String, String> {
    let wrong = |what: String| {
        format!(
            "spec.namingStrategy.template {template:?}: {what}: use {{{{ .machine.name }}}}, if, comparisons, len, trunc and \
             trimSuffix"
        )
    };
    let mut pieces = pieces(template).map_err(wrong)?.into_iter();
    let mut out = String::new();
    let end = run(&mut pieces, machine, Some(&mut out), DEEPEST).map_err(wrong)?;
    match end {
        Stop::Template if out.is_empty() => Err(wrong("the name is empty".into())),
        Stop::Template => Ok(out),
        Stop::Else(_) | Stop::End => Err(wrong("an else or end has no if".into())),
    }
}

enum Piece<'a> {
    Text(&'a str),
    Action(&'a str),
}

/// Splits a template into text and actions. A dash in an action's brace trims the text beside it.
fn pieces(template: &str) -> Result<Vec<Piece<'_>>, String> {
    let mut pieces = Vec::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let end = end_of_action(after).ok_or("an action has no end")?;
        let (mut inside, mut next) = (&after[..end], &after[end + 2..]);
        let mut text = before;
        if let Some(trimmed) = inside.strip_prefix("- ") {
            (inside, text) = (trimmed, text.trim_end());
        }
        if let Some(trimmed) = inside.strip_suffix(" -") {
            (inside, next) = (trimmed, next.trim_start());
        }
        pieces.extend([Piece::Text(text), Piece::Action(inside.trim())]);
        rest = next;
    }
    pieces.push(Piece::Text(rest));
    Ok(pieces)
}

/// Returns where an action's braces close, outside of quotes.
fn end_of_action(text: &str) -> Option<usize> {
    let mut quote = None;
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (None, '"' | '`') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            (None, '}') if text[at..].starts_with("}}") => return Some(at),
            _ => {}
        }
    }
    None
}

/// What ended a part of a template.
enum Stop<'a> {
    Template,
    End,
    /// An else, with the condition behind it.
    Else(&'a str),
}

/// Carries out pieces up to the end of the part that they begin with. Without an `out` it checks the syntax alone.
fn run<'a>(
    pieces: &mut std::vec::IntoIter<Piece<'a>>,
    machine: &str,
    mut out: Option<&mut String>,
    depth: usize,
) -> Result<Stop<'a>, String> {
    let depth = depth.checked_sub(1).ok_or("it is nested too deeply")?;
    while let Some(piece) = pieces.next() {
        let action = match piece {
            Piece::Text(text) => {
                if let Some(out) = out.as_deref_mut() {
                    out.push_str(text);
                }
                continue;
            }
            Piece::Action(action) => action,
        };
        let (word, rest) = action.split_once(char::is_whitespace).unwrap_or((action, ""));
        match word {
            "end" => return Ok(Stop::End),
            "else" => return Ok(Stop::Else(rest.trim())),
            "if" => branches(pieces, machine, out.as_deref_mut(), depth, rest)?,
            _ => {
                let value = evaluate(action, machine, depth)?;
                if let Some(out) = out.as_deref_mut() {
                    out.push_str(&value.to_string());
                }
            }
        }
    }
    Ok(Stop::Template)
}

/// Carries out the first branch whose condition is true.
fn branches<'a>(
    pieces: &mut std::vec::IntoIter<Piece<'a>>,
    machine: &str,
    mut out: Option<&mut String>,
    depth: usize,
    condition: &str,
) -> Result<(), String> {
    let mut taken = evaluate(condition, machine, depth)?.is_true();
    let mut done = taken;
    loop {
        let end = run(pieces, machine, out.as_deref_mut().filter(|_| taken), depth)?;
        match end {
            Stop::Template => return Err("an if has no end".into()),
            Stop::End => return Ok(()),
            Stop::Else("") => taken = !done,
            Stop::Else(condition) => {
                let condition = condition.strip_prefix("if ").ok_or("an else has more than an if")?;
                taken = evaluate(condition, machine, depth)?.is_true() && !done;
            }
        }
        done |= taken;
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Open,
    Close,
    Pipe,
    Name,
    Literal(Value),
    Function(String),
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '(' | ')' | '|' => {
                tokens.push(match first {
                    '(' => Token::Open,
                    ')' => Token::Close,
                    _ => Token::Pipe,
                });
                1
            }
            '"' | '`' => {
                let end = rest[1..].find(first).ok_or("a text has no closing quote")?;
                let literal = &rest[1..=end];
                if first == '"' && literal.contains('\\') {
                    return Err("a text has a backslash".into());
                }
                tokens.push(Token::Literal(Value::Text(literal.to_owned())));
                end + 2
            }
            _ => {
                let end = rest.find(|c: char| c.is_whitespace() || "()|\"`".contains(c));
                let word = &rest[..end.unwrap_or(rest.len())];
                tokens.push(match word {
                    ".machine.name" => Token::Name,
                    "true" | "false" => Token::Literal(Value::Truth(word == "true")),
                    _ => word.parse().map_or_else(
                        |_| Token::Function(word.to_owned()),
                        |number| Token::Literal(Value::Number(number)),
                    ),
                });
                word.len()
            }
        };
        rest = rest[length..].trim_start();
    }
    Ok(tokens)
}

fn evaluate(action: &str, machine: &str, depth: usize) -> Result<Value, String> {
    let mut tokens = tokens(action)?.into_iter().peekable();
    let value = pipeline(&mut tokens, machine, depth)?;
    match tokens.next() {
        None => Ok(value),
        Some(_) => Err(format!("{action:?} has a parenthesis too many")),
    }
}

type Tokens = std::iter::Peekable<std::vec::IntoIter<Token>>;

/// Evaluates commands between bars: each is given the value of the one before as its last argument.
fn pipeline(tokens: &mut Tokens, machine: &str, depth: usize) -> Result<Value, String> {
    let depth = depth.checked_sub(1).ok_or("it is nested too deeply")?;
    let mut piped = None;
    loop {
        let function = match tokens.peek() {
            Some(Token::Function(_)) => match tokens.next() {
                Some(Token::Function(name)) => Some(name),
                _ => None,
            },
            _ => None,
        };
        let mut arguments = Vec::new();
        loop {
            let value = match tokens.peek() {
                None | Some(Token::Close | Token::Pipe) => break,
                Some(Token::Function(name)) => return Err(format!("{name:?} is not known")),
                Some(Token::Name) => Value::Text(machine.to_owned()),
                Some(Token::Literal(value)) => value.clone(),
                Some(Token::Open) => {
                    tokens.next();
                    let value = pipeline(tokens, machine, depth)?;
                    if tokens.peek() != Some(&Token::Close) {
                        return Err("a parenthesis has no end".into());
                    }
                    value
                }
            };
            tokens.next();
            arguments.push(value);
        }
        arguments.extend(piped.take());
        let value = match function {
            Some(name) => call(&name, &arguments)?,
            None => match <[Value; 1]>::try_from(arguments) {
                Ok([value]) => value,
                Err(_) => return Err("a value is not one value".into()),
            },
        };
        if tokens.next_if_eq(&Token::Pipe).is_none() {
            return Ok(value);
        }
        piped = Some(value);
    }
}

fn call(name: &str, arguments: &[Value]) -> Result<Value, String> {
    use Value::{Number, Text, Truth};
    Ok(match (name, arguments) {
        ("lower", [Text(text)]) => Text(text.to_lowercase()),
        ("trunc", [Number(count), Text(text)]) => Text(truncated(text, *count)),
        ("trimSuffix", [Text(suffix), Text(text)]) => {
            Text(text.strip_suffix(suffix.as_str()).unwrap_or(text).to_owned())
        }
        ("len", [Text(text)]) => Number(i64::try_from(text.len()).unwrap_or(i64::MAX)),
        ("not", [value]) => Truth(!value.is_true()),
        ("and", [.., last]) => arguments.iter().find(|value| !value.is_true()).unwrap_or(last).clone(),
        ("or", [.., last]) => arguments.iter().find(|value| value.is_true()).unwrap_or(last).clone(),
        ("eq", [first, others @ ..]) if !others.is_empty() => Truth(others.contains(first)),
        ("ne", [one, other]) => Truth(one != other),
        ("lt" | "le" | "gt" | "ge", [one, other]) => {
            let order = match (one, other) {
                (Text(one), Text(other)) => one.cmp(other),
                (Number(one), Number(other)) => one.cmp(other),
                _ => return Err(format!("{name} compares a text with a number")),
            };
            Truth(match name {
                "lt" => order.is_lt(),
                "le" => order.is_le(),
                "gt" => order.is_gt(),
                _ => order.is_ge(),
            })
        }
        _ => return Err(format!("{name:?} is not known, or not with these arguments")),
    })
}

/// Returns the first characters of a text, or with a negative number the last ones.
fn truncated(text: &str, count: i64) -> String {
    let keep = usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX);
    let skip = if count < 0 {
        text.chars().count().saturating_sub(keep)
    } else {
        0
    };
    text.chars().skip(skip).take(keep).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const DOCUMENTED: &str = "{{ if le (len .machine.name) 20 }}{{ .machine.name }}{{else}}{{ trimSuffix \"-\" (trunc 14 \
                              .machine.name) }}-{{ trunc -5 .machine.name }}{{end}}";

    #[rstest]
    #[case::short("vm-{{ .machine.name }}", "m1", "vm-m1")]
    #[case::documented(DOCUMENTED, "quick-start-d34gt4", "quick-start-d34gt4")]
    #[case::documented_long(DOCUMENTED, "quick-start-d34gt4-md-0-wqc85-8nxwc-gfd5v", "quick-start-d3-gfd5v")]
    #[case::documented_dash(DOCUMENTED, "quick-start-d-34gt4-md-0-wqc85-8nxwc-gfd5v", "quick-start-d-gfd5v")]
    #[case::piped("{{ .machine.name | trunc 3 | trimSuffix \"-\" }}", "ab-cd", "ab")]
    #[case::piped_into_parentheses("{{ if (.machine.name | len | eq 5) }}five{{ end }}!", "ab-cd", "five!")]
    #[case::else_if(
        "{{if eq .machine.name \"a\"}}1{{else if eq .machine.name \"b\" `c`}}2{{else}}3{{end}}",
        "c",
        "2"
    )]
    #[case::else_if_first("{{if eq .machine.name \"a\" \"c\"}}1{{else if true}}2{{else}}3{{end}}", "c", "1")]
    #[case::nested(
        "{{if true}}{{if not false}}x{{else}}y{{end}}{{else}}{{if true}}z{{end}}{{end}}",
        "m",
        "x"
    )]
    #[case::trimmed("a {{- .machine.name -}} b", "m", "amb")]
    #[case::negative("{{ trunc -2 .machine.name }}", "worker", "er")]
    #[case::words("{{ if and (gt (len .machine.name) 2) (or false true) }}x{{ end }}", "worker", "x")]
    #[case::braces_in_a_text("{{ trimSuffix \"}}\" .machine.name }}", "m", "m")]
    fn a_template_makes_a_name(#[case] template: &str, #[case] machine: &str, #[case] expected: &str) {
        assert_eq!(fill(template, machine).as_deref(), Ok(expected));
    }

    #[rstest]
    #[case::unknown_data("{{ .cluster.name }}", "\".cluster.name\" is not known")]
    #[case::unknown_function("{{ printf .machine.name }}", "\"printf\" is not known")]
    #[case::unknown_in_a_branch_not_taken("{{ if false }}{{ nothing }}{{ end }}x", "\"nothing\" is not known")]
    #[case::open("{{ .machine.name", "an action has no end")]
    #[case::no_end("{{ if true }}x", "an if has no end")]
    #[case::no_if("x{{ end }}", "has no if")]
    #[case::too_many("{{ .machine.name) }}", "a parenthesis too many")]
    #[case::too_few("{{ (.machine.name }}", "a parenthesis has no end")]
    #[case::two_values("{{ .machine.name 3 }}", "not one value")]
    #[case::kinds("{{ lt .machine.name 3 }}", "compares a text with a number")]
    #[case::empty("{{ trunc 0 .machine.name }}", "the name is empty")]
    fn a_template_that_cannot_be_filled_is_refused(#[case] template: &str, #[case] expected: &str) {
        let error = fill(template, "m").unwrap_err();
        assert!(
            error.contains(expected) && error.contains("spec.namingStrategy.template"),
            "{error}"
        );
    }

    #[test]
    fn a_template_cannot_exhaust_the_stack() {
        for deep in [
            "{{".to_owned() + &"(".repeat(100_000) + "}}",
            "{{ if true }}".repeat(100_000),
        ] {
            assert!(fill(&deep, "m").unwrap_err().contains("nested too deeply"));
        }
    }
}
