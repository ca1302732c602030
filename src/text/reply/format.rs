//! How models write calls of tools: one row per format. Detection, grammar and parser read the row.
//!
//! ```text
//! section.open  opener NAME ARGUMENTS closer  between  opener NAME ARGUMENTS closer  section.close
//! ```
//! A row holds each text as the model writes it, with its white space. The grammar demands that white space; the parser
//! does not.

/// One way to write calls among the text of an answer.
#[derive(Debug, PartialEq)]
pub(super) struct CallFormat {
    /// A chat template with all of these texts writes this format, unless it has those of an earlier row.
    pub(super) marks: &'static [&'static str],
    /// Stands around all calls of an answer. `None`: each call stands alone.
    pub(super) section: Option<Section>,
    /// What the parser takes for the beginning of a call outside of a section.
    pub(super) starts: &'static [&'static str],
    /// Opens a call.
    pub(super) opener: &'static str,
    /// Where the call names its tool.
    pub(super) name: Name,
    /// How the call gives its arguments.
    pub(super) arguments: ArgumentForm,
    /// Closes a call. Empty: the end of the parameters does.
    pub(super) closer: &'static str,
    /// Stands between two calls.
    pub(super) between: &'static str,
}

/// The texts around all calls of an answer.
#[derive(Debug, PartialEq)]
pub(super) struct Section {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

/// Where a call names its tool.
#[derive(Debug, PartialEq)]
pub(super) enum Name {
    /// After this text, in a JSON object that holds the arguments too: `{"name": NAME, "arguments": {..}}`.
    Field(&'static str),
    /// Between two texts. Quotes there may be missing.
    Tag(&'static str, &'static str),
    /// Before this end of its line. The parser also ends it at a tag.
    Line(&'static str),
    /// Before this separator.
    Before(&'static str),
    /// After `function` and this separator; the arguments stand between the two texts of a fence.
    Fenced(&'static str, [&'static str; 2]),
    /// In an id before this separator: `functions.NAME:COUNT`.
    Id(&'static str),
}

/// How a call gives its arguments.
#[derive(Debug, PartialEq)]
pub(super) enum ArgumentForm {
    /// As one JSON object.
    Json,
    /// One by one, between tags.
    Parameters(Frame),
}

/// The tags of a parameter. Quotes around the key may be missing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Frame {
    pub(super) before_key: &'static str,
    pub(super) after_key: &'static str, // the parser forgives when it is missing
    pub(super) before_value: &'static str,
    pub(super) after_value: &'static str,
    pub(super) between: &'static str, // after each parameter
    pub(super) end: &'static str,     // after all parameters; empty: the call's closer ends them
}

/// What a model marks in replies with tags.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Markup {
    pub(super) thinks: bool, // in `<think>..</think>`, first
    pub(super) format: Option<&'static CallFormat>,
}

/// All rows; the first whose marks a template has is its format.
pub(super) const FORMATS: &[&CallFormat] =
    &[&DEEPSEEK_V3, &DEEPSEEK_V31, &KIMI, &MINIMAX, &GLM_47, &GLM, &QWEN_CODER, &HERMES];

impl CallFormat {
    /// The format that this chat template writes.
    pub(super) fn of(template: &str) -> Option<&'static CallFormat> {
        FORMATS.iter().copied().find(|format| format.marks.iter().all(|mark| template.contains(mark)))
    }
}

/// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen2.5, Qwen3.
pub(super) const HERMES: CallFormat = CallFormat {
    marks: &["<tool_call>"],
    section: None,
    starts: &["<tool_call>"],
    opener: "<tool_call>",
    name: Name::Field("\n"),
    arguments: ArgumentForm::Json,
    closer: "\n</tool_call>",
    between: "\n",
};

/// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.
pub(super) const QWEN_CODER: CallFormat = CallFormat {
    marks: &["<tool_call>", "<function="],
    section: None,
    starts: &["<tool_call>", "<function="], // the models forget the outer tag at times
    opener: "<tool_call>",
    name: Name::Tag("\n<function=", ">\n"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<parameter=",
        after_key: "",
        before_value: ">\n",
        after_value: "\n</parameter>",
        between: "\n",
        end: "</function>\n",
    }),
    closer: "</tool_call>",
    between: "\n",
};

/// `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5 and 4.6.
pub(super) const GLM: CallFormat = CallFormat {
    marks: &["<tool_call>", "<arg_key>"],
    section: None,
    starts: &["<tool_call>"],
    opener: "<tool_call>",
    name: Name::Line("\n"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<arg_key>",
        after_key: "</arg_key>\n",
        before_value: "<arg_value>",
        after_value: "</arg_value>",
        between: "\n",
        end: "",
    }),
    closer: "</tool_call>",
    between: "\n",
};

/// The same without line ends: GLM-4.7.
pub(super) const GLM_47: CallFormat = CallFormat {
    marks: &["<tool_call>", "</arg_key><arg_value>"],
    name: Name::Line(""),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<arg_key>",
        after_key: "</arg_key>",
        before_value: "<arg_value>",
        after_value: "</arg_value>",
        between: "",
        end: "",
    }),
    between: "",
    ..GLM
};

/// `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` and fenced JSON in a section: DeepSeek-V3 and R1.
pub(super) const DEEPSEEK_V3: CallFormat = CallFormat {
    marks: &["<｜tool▁calls▁begin｜>", "```json"],
    name: Name::Fenced("<｜tool▁sep｜>", ["\n```json\n", "\n```"]),
    between: "\n",
    ..DEEPSEEK_V31
};

/// `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}` in a section: DeepSeek-V3.1.
pub(super) const DEEPSEEK_V31: CallFormat = CallFormat {
    marks: &["<｜tool▁calls▁begin｜>"],
    section: Some(Section { open: "<｜tool▁calls▁begin｜>", close: "<｜tool▁calls▁end｜>" }),
    starts: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    opener: "<｜tool▁call▁begin｜>",
    name: Name::Before("<｜tool▁sep｜>"),
    arguments: ArgumentForm::Json,
    closer: "<｜tool▁call▁end｜>",
    between: "",
};

/// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{..}` in a section: Kimi K2.
pub(super) const KIMI: CallFormat = CallFormat {
    marks: &["<|tool_calls_section_begin|>"],
    section: Some(Section { open: "<|tool_calls_section_begin|>", close: "<|tool_calls_section_end|>" }),
    starts: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    opener: "<|tool_call_begin|>",
    name: Name::Id("<|tool_call_argument_begin|>"),
    arguments: ArgumentForm::Json,
    closer: "<|tool_call_end|>",
    between: "",
};

/// `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a section: MiniMax-M2.
pub(super) const MINIMAX: CallFormat = CallFormat {
    marks: &["<minimax:tool_call>"],
    section: Some(Section { open: "<minimax:tool_call>\n", close: "\n</minimax:tool_call>" }),
    starts: &["<minimax:tool_call>"],
    opener: "<invoke name=",
    name: Name::Tag("\"", "\">\n"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<parameter name=\"",
        after_key: "\"",
        before_value: ">",
        after_value: "</parameter>",
        between: "\n",
        end: "</invoke>",
    }),
    closer: "",
    between: "\n",
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_hold_together() {
        for &format in FORMATS {
            assert_eq!(CallFormat::of(&format.marks.join(" ")), Some(format), "an earlier row takes its templates");
            let first = format.section.as_ref().map_or(format.opener, |section| section.open.trim_end());
            assert_eq!(format.starts[0], first, "the grammar's first text starts a call for the parser too");
            let end = match &format.arguments {
                ArgumentForm::Parameters(frame) if !frame.end.is_empty() => frame.end,
                _ => format.closer,
            };
            assert!(!end.trim().is_empty(), "{format:?}: nothing ends the arguments");
        }
    }
}
