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
    /// Whose it is.
    pub(super) models: &'static str,
    /// A chat template with all of these texts writes this format, unless it has those of an earlier row.
    pub(super) marks: &'static [&'static str],
    /// Where a call may stand.
    pub(super) place: Place,
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
    /// Closes a call. Empty: the end of the arguments does.
    pub(super) closer: &'static str,
    /// Stands between two calls.
    pub(super) between: &'static str,
    /// Another way in which these models write calls, which the parser reads too.
    pub(super) other: Option<&'static CallFormat>,
}

/// Where a call may stand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place {
    /// Anywhere in the answer.
    Anywhere,
    /// Before all text: its beginning is no marker.
    First,
}

/// The texts around all calls of an answer.
#[derive(Debug, PartialEq)]
pub(super) struct Section {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

impl Section {
    /// What begins a section for the parser: without the bracket of a list.
    pub(super) fn marker(&self) -> &'static str {
        match self.open.trim_end().trim_end_matches(['[', '{']).trim_end() {
            "" => self.open.trim_end(),
            marker => marker,
        }
    }
}

/// Where a call names its tool.
#[derive(Debug, PartialEq)]
pub(super) enum Name {
    /// In a JSON object that holds the arguments too.
    Field(Fields),
    /// As the key of the arguments: `"NAME": {..}`.
    Key,
    /// Between two texts. Quotes there may be missing.
    Tag(&'static str, &'static str),
    /// Between the first two texts; the call's number stands between the last two.
    Numbered(&'static str, &'static str, &'static str),
    /// Before this end of its line. The parser also ends it at a tag.
    Line(&'static str),
    /// Before this separator.
    Before(&'static str),
    /// Before the second separator; a call's id may stand behind the first one.
    BeforeId(&'static str, &'static str),
    /// Between the two separators, behind the call's id.
    AfterId(&'static str, &'static str),
    /// After `function` and this separator; the arguments stand between the two texts of a fence.
    Fenced(&'static str, [&'static str; 2]),
    /// In an id before this separator: `functions.NAME:COUNT`.
    Id(&'static str),
}

/// The fields of a call that is one JSON object. Others may stand among them.
#[derive(Debug, PartialEq)]
pub(super) struct Fields {
    pub(super) before: &'static str, // up to the first field
    pub(super) number: &'static str, // the field with the call's number; empty: there is none
    pub(super) name: &'static str,
    pub(super) arguments: &'static str,
}

/// `{"name": .., "arguments": {..}}`.
const FIELDS: Fields = Fields { before: "{", number: "", name: "name", arguments: "arguments" };

/// How a call gives its arguments.
#[derive(Debug, PartialEq)]
pub(super) enum ArgumentForm {
    /// As one JSON object.
    Json,
    /// One by one, between tags.
    Parameters(Frame),
    /// As `KEY=VALUE` or `KEY:VALUE` between commas.
    Literals(Dialect),
}

/// How literals are written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Dialect {
    pub(super) equals: char,
    pub(super) end: char,           // after the last argument
    pub(super) quote: &'static str, // around text, beside `'` and `"`; empty: there is no other
    pub(super) between: &'static str,
}

/// The tags of a parameter. Quotes around the key may be missing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Frame {
    pub(super) before_key: &'static str,
    pub(super) after_key: &'static str, // the parser forgives when it is missing
    pub(super) kind: Kind,
    pub(super) before_value: &'static str,
    pub(super) after_value: &'static str,
    pub(super) between: &'static str, // after each parameter
    pub(super) end: &'static str,     // after all parameters; empty: the call's closer ends them
}

impl Frame {
    /// What ends the value of this key.
    pub(super) fn close(&self, key: &str) -> String {
        match self.kind {
            Kind::Nested(_) => format!("{}{key}>", self.after_value),
            _ => self.after_value.into(),
        }
    }
}

/// What a parameter's tag says of its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// Nothing: the tool's schema does.
    Unsaid,
    /// ` string="true"` for text, else ` string="false"`.
    Flag,
    /// ` type="string"` and other types of JSON.
    Type,
    /// Nothing; text may stand between `<![CDATA[` and `]]>`.
    Cdata,
    /// Nothing; the closing tag repeats the key, and objects and lists are tags again, which begin with this text.
    Nested(&'static str),
}

/// How a model marks what it thinks.
#[derive(Debug, PartialEq)]
pub(super) struct Thoughts {
    /// A chat template with this text has these marks, unless it has that of an earlier row.
    mark: &'static str,
    pub(super) open: &'static str,
    pub(super) close: &'static str,
    /// Stands between the thoughts and what follows.
    pub(super) then: &'static str,
}

/// What a model marks in replies with tags.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Markup {
    pub(super) thoughts: Option<&'static Thoughts>, // first
    pub(super) wrappers: &'static [&'static str],   // around the answer, and no part of it
    pub(super) format: Option<&'static CallFormat>,
}

/// All rows of thoughts; the first whose mark a template has is its own.
#[rustfmt::skip]
const THOUGHTS: &[Thoughts] = &[
    Thoughts { mark: "<think{}>", open: "<think:opensource>", close: "</think:opensource>", ..THINK }, // Hy3
    Thoughts { mark: "<seed:think>", open: "<seed:think>", close: "</seed:think>", ..THINK },
    Thoughts { mark: "<mm:think>", open: "<mm:think>", close: "</mm:think>", ..THINK }, // MiniMax-M3
    Thoughts { mark: "[THINK]", open: "[THINK]", close: "[/THINK]", ..THINK }, // Mistral
    Thoughts { mark: "<|START_THINKING|>", open: "<|START_THINKING|>", close: "<|END_THINKING|>", ..THINK }, // Command
    Thoughts { mark: "<|channel>thought", open: "<|channel>thought\n", close: "<channel|>", ..THINK }, // Gemma 4
    Thoughts { mark: "open_tag('think')", open: "<|open|>think<|sep|>", close: "<|close|>think<|sep|>", ..THINK }, // K3
    Thoughts { mark: "assistant<|think|>", open: "<|think|>", close: "<|end|>", then: "<|begin|>assistant" }, // Solar
    Thoughts { mark: "<|inner_prefix|>", open: "<|inner_prefix|>", close: "<|inner_suffix|>", ..THINK }, // Apertus
    Thoughts { mark: "[BEGIN FINAL RESPONSE]", open: "Here are my reasoning steps:\n",
        close: "[BEGIN FINAL RESPONSE]", ..THINK }, // Apriel
    THINK,
    Thoughts { mark: "<think>", ..THINK },
];

const THINK: Thoughts = Thoughts { mark: "</think>", open: "<think>", close: "</think>", then: "" };

impl Thoughts {
    /// The marks that this chat template writes.
    fn of(template: &str) -> Option<&'static Thoughts> {
        THOUGHTS.iter().find(|thoughts| template.contains(thoughts.mark))
    }
}

/// What stands around answers, by a text of the template.
#[rustfmt::skip]
const WRAPPERS: &[(&str, &[&str])] = &[
    ("<|START_ACTION|>", &["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"]), // Command
    ("open_tag('response')", &["<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"]), // K3
    ("<|tool_call:begin|>", &["<|begin|>assistant", "<|content|>", "<|end|>"]), // Solar
    ("[BEGIN FINAL RESPONSE]", &["[END FINAL RESPONSE]"]), // Apriel
    ("<|role_sep|>", &["<|message_sep|>"]), // GigaChat
];

impl Markup {
    /// What this chat template marks.
    pub(super) fn of(template: &str) -> Self {
        let wrappers = WRAPPERS.iter().find(|(mark, _)| template.contains(mark)).map_or(&[][..], |(_, texts)| texts);
        Self { thoughts: Thoughts::of(template), wrappers, format: CallFormat::of(template) }
    }
}

/// All rows of calls; the first whose marks a template has is its format.
pub(super) const FORMATS: &[&CallFormat] = &[
    &DEEPSEEK_V32,
    &DEEPSEEK_V4,
    &DEEPSEEK_V3,
    &DEEPSEEK_V31,
    &KIMI_K3,
    &KIMI,
    &MINIMAX_M3,
    &MINIMAX,
    &HY3,
    &SOLAR,
    &GEMMA,
    &COMMAND,
    &COMMAND_R,
    &MISTRAL,
    &MISTRAL_LIST,
    &LFM2,
    &SEED,
    &GIGACHAT_31,
    &GIGACHAT,
    &APERTUS,
    &APRIEL,
    &MINIMAX_M1,
    &NEMOTRON,
    &GRANITE,
    &MINICPM,
    &GLM_47,
    &GLM,
    &QWEN_CODER,
    &HERMES,
    &FUNCTIONARY,
    &LLAMA,
    &LLAMA_4,
];

impl CallFormat {
    /// The format that this chat template writes.
    pub(super) fn of(template: &str) -> Option<&'static CallFormat> {
        FORMATS.iter().copied().find(|format| format.marks.iter().all(|mark| template.contains(mark)))
    }

    /// The closer, if it ends a call wherever it stands: a special token, that is. A tag may stand in a string.
    pub(super) fn token_closer(&self) -> Option<&'static str> {
        ["<|", "<｜"].iter().any(|start| self.closer.starts_with(start)).then_some(self.closer)
    }

    /// This format and the other ones of the same models.
    pub(super) fn ways(&'static self) -> impl Iterator<Item = &'static CallFormat> {
        std::iter::successors(Some(self), |format| format.other)
    }
}

/// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
pub(super) const HERMES: CallFormat = CallFormat {
    models: "Hermes, Qwen 2.5 and 3, Granite 4, ERNIE 4.5, SmolLM3, MiMo-VL, Bielik, Reka",
    marks: &["<tool_call>"],
    place: Place::Anywhere,
    section: None,
    starts: &["<tool_call>"],
    opener: "<tool_call>",
    name: Name::Field(Fields { before: "\n{", ..FIELDS }),
    arguments: ArgumentForm::Json,
    closer: "}\n</tool_call>",
    between: "\n",
    other: None,
};

/// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
pub(super) const QWEN_CODER: CallFormat = CallFormat {
    models: "Qwen3-Coder, Qwen3.5, Step-3.5, MiMo-V2, Nemotron 3",
    marks: &["<tool_call>", "<function="],
    starts: &["<tool_call>", "<function="], // the models forget the outer tag at times
    name: Name::Tag("\n<function=", ">\n"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<parameter=",
        after_key: "",
        kind: Kind::Unsaid,
        before_value: ">\n",
        after_value: "\n</parameter>",
        between: "\n",
        end: "</function>\n",
    }),
    closer: "</tool_call>",
    ..HERMES
};

/// `<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>`.
pub(super) const SEED: CallFormat = CallFormat {
    models: "Seed-OSS",
    marks: &["<seed:tool_call>"],
    starts: &["<seed:tool_call>", "<function="],
    opener: "<seed:tool_call>",
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<parameter=",
        after_key: "",
        kind: Kind::Unsaid,
        before_value: ">",
        after_value: "</parameter>",
        between: "\n",
        end: "</function>\n",
    }),
    closer: "</seed:tool_call>",
    ..QWEN_CODER
};

/// `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.
pub(super) const GLM: CallFormat = CallFormat {
    models: "GLM-4.5 and 4.6, Ling 3.0, Laguna XS",
    marks: &["<tool_call>", "<arg_key>"],
    name: Name::Line("\n"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<arg_key>",
        after_key: "</arg_key>\n",
        kind: Kind::Unsaid,
        before_value: "<arg_value>",
        after_value: "</arg_value>",
        between: "\n",
        end: "",
    }),
    closer: "</tool_call>",
    ..HERMES
};

/// The same without line ends.
pub(super) const GLM_47: CallFormat = CallFormat {
    models: "GLM-4.7, 5 and 5.3-Flash, Laguna S, Spark",
    marks: &["<tool_call>", "</arg_key><arg_value>"],
    name: Name::Line(""),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<arg_key>",
        after_key: "</arg_key>",
        kind: Kind::Unsaid,
        before_value: "<arg_value>",
        after_value: "</arg_value>",
        between: "",
        end: "",
    }),
    between: "",
    ..GLM
};

/// `<tool_call:opensource>NAME<tool_sep:opensource>` and GLM's tags with the same ending, in a section.
pub(super) const HY3: CallFormat = CallFormat {
    models: "Hy3",
    marks: &["<tool_sep{}>", "':opensource'"],
    section: Some(Section { open: "<tool_calls:opensource>\n", close: "\n</tool_calls:opensource>" }),
    starts: &["<tool_calls:opensource>", "<tool_call:opensource>"],
    opener: "<tool_call:opensource>",
    name: Name::Before("<tool_sep:opensource>\n"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<arg_key:opensource>",
        after_key: "</arg_key:opensource>\n",
        kind: Kind::Unsaid,
        before_value: "<arg_value:opensource>",
        after_value: "</arg_value:opensource>",
        between: "\n",
        end: "",
    }),
    closer: "</tool_call:opensource>",
    ..HERMES
};

/// `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` and fenced JSON in a section.
pub(super) const DEEPSEEK_V3: CallFormat = CallFormat {
    models: "DeepSeek V3 and R1",
    marks: &["<｜tool▁calls▁begin｜>", "```json"],
    name: Name::Fenced("<｜tool▁sep｜>", ["\n```json\n", "\n```"]),
    between: "\n",
    ..DEEPSEEK_V31
};

/// `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}` in a section.
pub(super) const DEEPSEEK_V31: CallFormat = CallFormat {
    models: "DeepSeek V3.1",
    marks: &["<｜tool▁calls▁begin｜>"],
    section: Some(Section { open: "<｜tool▁calls▁begin｜>", close: "<｜tool▁calls▁end｜>" }),
    starts: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    opener: "<｜tool▁call▁begin｜>",
    name: Name::Before("<｜tool▁sep｜>"),
    closer: "<｜tool▁call▁end｜>",
    between: "",
    ..HERMES
};

/// `<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter></｜DSML｜invoke>` in a
/// section.
pub(super) const DEEPSEEK_V32: CallFormat = CallFormat {
    models: "DeepSeek V3.2",
    marks: &["｜DSML｜", "function_calls>"],
    section: Some(Section { open: "<｜DSML｜function_calls>\n", close: "\n</｜DSML｜function_calls>" }),
    starts: &["<｜DSML｜function_calls>", "<｜DSML｜invoke"],
    opener: "<｜DSML｜invoke name=",
    name: Name::Tag("\"", "\">\n"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<｜DSML｜parameter name=\"",
        after_key: "\"",
        kind: Kind::Flag,
        before_value: ">",
        after_value: "</｜DSML｜parameter>",
        between: "\n",
        end: "</｜DSML｜invoke>",
    }),
    closer: "",
    ..HERMES
};

/// The same in a section of another name.
pub(super) const DEEPSEEK_V4: CallFormat = CallFormat {
    models: "DeepSeek V4",
    marks: &["｜DSML｜"],
    section: Some(Section { open: "<｜DSML｜tool_calls>\n", close: "\n</｜DSML｜tool_calls>" }),
    starts: &["<｜DSML｜tool_calls>", "<｜DSML｜invoke"],
    ..DEEPSEEK_V32
};

/// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{..}` in a section.
pub(super) const KIMI: CallFormat = CallFormat {
    models: "Kimi K2",
    marks: &["<|tool_calls_section_begin|>"],
    section: Some(Section { open: "<|tool_calls_section_begin|>", close: "<|tool_calls_section_end|>" }),
    starts: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    opener: "<|tool_call_begin|>",
    name: Name::Id("<|tool_call_argument_begin|>"),
    closer: "<|tool_call_end|>",
    between: "",
    ..HERMES
};

/// `<|open|>call tool="NAME" index="1"<|sep|>`, arguments as tags of the same kind, in a section.
pub(super) const KIMI_K3: CallFormat = CallFormat {
    models: "Kimi K3",
    marks: &["<|open|>", "open_tag('tools'"],
    section: Some(Section { open: "<|open|>tools<|sep|>", close: "<|close|>tools<|sep|>" }),
    starts: &["<|open|>tools<|sep|>", "<|open|>call tool="],
    opener: "<|open|>call tool=",
    name: Name::Numbered("\"", "\" index=\"", "\"<|sep|>"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<|open|>argument key=\"",
        after_key: "\"",
        kind: Kind::Type,
        before_value: "<|sep|>",
        after_value: "<|close|>argument<|sep|>",
        between: "",
        end: "",
    }),
    closer: "<|close|>call<|sep|>",
    between: "",
    ..HERMES
};

/// `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a section.
pub(super) const MINIMAX: CallFormat = CallFormat {
    models: "MiniMax-M2",
    marks: &["<minimax:tool_call>"],
    section: Some(Section { open: "<minimax:tool_call>\n", close: "\n</minimax:tool_call>" }),
    starts: &["<minimax:tool_call>"],
    opener: "<invoke name=",
    name: Name::Tag("\"", "\">\n"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<parameter name=\"",
        after_key: "\"",
        kind: Kind::Unsaid,
        before_value: ">",
        after_value: "</parameter>",
        between: "\n",
        end: "</invoke>",
    }),
    closer: "",
    ..HERMES
};

/// `<invoke name="NAME"><KEY>VALUE</KEY></invoke>` in a section, with a token before each tag.
pub(super) const MINIMAX_M3: CallFormat = CallFormat {
    models: "MiniMax-M3",
    marks: &["]<]minimax[>["],
    section: Some(Section { open: "]<]minimax[>[<tool_call>\n", close: "\n]<]minimax[>[</tool_call>" }),
    starts: &["]<]minimax[>[<tool_call>", "]<]minimax[>[<invoke"],
    opener: "]<]minimax[>[<invoke name=",
    name: Name::Tag("\"", "\">"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "]<]minimax[>[<",
        after_key: "",
        kind: Kind::Nested("]<]minimax[>[<"),
        before_value: ">",
        after_value: "]<]minimax[>[</",
        between: "",
        end: "]<]minimax[>[</invoke>",
    }),
    closer: "",
    ..HERMES
};

/// `{"name": .., "arguments": {..}}` on lines in a section.
pub(super) const MINIMAX_M1: CallFormat = CallFormat {
    models: "MiniMax-M1",
    marks: &["<tool_calls>"],
    section: Some(Section { open: "<tool_calls>\n", close: "\n</tool_calls>" }),
    starts: &["<tool_calls>"],
    opener: "{",
    name: Name::Field(Fields { before: "", ..FIELDS }),
    closer: "}",
    ..HERMES
};

/// `[{"name": .., "arguments": {..}, "id": ..}]` in a section.
pub(super) const APRIEL: CallFormat = CallFormat {
    models: "Apriel",
    marks: &["<tool_calls>["],
    section: Some(Section { open: "<tool_calls>[", close: "]</tool_calls>" }),
    between: ", ",
    ..MINIMAX_M1
};

/// The same with other tags.
pub(super) const NEMOTRON: CallFormat = CallFormat {
    models: "Nemotron Nano 2",
    marks: &["<TOOLCALL>"],
    section: Some(Section { open: "<TOOLCALL>[", close: "]</TOOLCALL>" }),
    starts: &["<TOOLCALL>"],
    ..APRIEL
};

/// The same behind a token.
pub(super) const GRANITE: CallFormat = CallFormat {
    models: "Granite 3",
    marks: &["<|tool_call|>"],
    section: Some(Section { open: "<|tool_call|>[", close: "]" }),
    starts: &["<|tool_call|>"],
    ..APRIEL
};

/// `[{"tool_call_id": "0", "tool_name": .., "parameters": {..}}]` in a section.
pub(super) const COMMAND: CallFormat = CallFormat {
    models: "Command R7B and A, Cohere's mixtures of experts",
    marks: &["<|START_ACTION|>"],
    section: Some(Section { open: "<|START_ACTION|>[\n    ", close: "\n]<|END_ACTION|>" }),
    starts: &["<|START_ACTION|>"],
    name: Name::Field(Fields { before: "", number: "tool_call_id", name: "tool_name", arguments: "parameters" }),
    between: ",\n    ",
    ..APRIEL
};

/// The same without a number, in fenced JSON.
pub(super) const COMMAND_R: CallFormat = CallFormat {
    models: "Command R and R+",
    marks: &["followed by a json-formatted list of actions"],
    section: Some(Section { open: "Action:\n```json\n[\n    ", close: "\n]```" }),
    starts: &["Action:\n```json"],
    name: Name::Field(Fields { before: "", number: "", name: "tool_name", arguments: "parameters" }),
    ..COMMAND
};

/// `[{"NAME": {..}}]` in a section.
pub(super) const APERTUS: CallFormat = CallFormat {
    models: "Apertus",
    marks: &["<|tools_prefix|>"],
    section: Some(Section { open: "<|tools_prefix|>[", close: "]<|tools_suffix|>" }),
    starts: &["<|tools_prefix|>"],
    name: Name::Key,
    ..APRIEL
};

/// `[TOOL_CALLS]NAME[ARGS]{..}`, since 2025.
pub(super) const MISTRAL: CallFormat = CallFormat {
    models: "Mistral Small 3.2, Devstral, Ministral",
    marks: &["[TOOL_CALLS]", "[ARGS]"],
    starts: &["[TOOL_CALLS]"],
    opener: "[TOOL_CALLS]",
    name: Name::BeforeId("[CALL_ID]", "[ARGS]"),
    closer: "",
    between: "",
    other: Some(&MISTRAL_LIST),
    ..HERMES
};

/// `[TOOL_CALLS][{"name": .., "arguments": {..}, "id": ..}]`.
pub(super) const MISTRAL_LIST: CallFormat = CallFormat {
    models: "Mistral Nemo, Mistral Small 3.1",
    marks: &["[TOOL_CALLS]"],
    section: Some(Section { open: "[TOOL_CALLS][", close: "]" }),
    starts: &["[TOOL_CALLS]"],
    ..APRIEL
};

/// `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{..}` in a section.
pub(super) const SOLAR: CallFormat = CallFormat {
    models: "Solar Open",
    marks: &["<|tool_call:begin|>"],
    section: Some(Section { open: "<|tool_calls|>", close: "<|calls|>" }),
    starts: &["<|tool_calls|>", "<|tool_call:begin|>"],
    opener: "<|tool_call:begin|>",
    name: Name::AfterId("<|tool_call:name|>", "<|tool_call:args|>"),
    closer: "<|tool_call:end|>",
    between: "",
    ..HERMES
};

/// `<|tool_call>call:NAME{KEY:VALUE}<tool_call|>`, texts between `<|"|>`.
pub(super) const GEMMA: CallFormat = CallFormat {
    models: "Gemma 4",
    marks: &["<|tool_call>call:"],
    starts: &["<|tool_call>"],
    opener: "<|tool_call>",
    name: Name::Tag("call:", "{"),
    arguments: ArgumentForm::Literals(Dialect { equals: ':', end: '}', quote: "<|\"|>", between: "," }),
    closer: "<tool_call|>",
    between: "",
    ..HERMES
};

/// `[NAME(KEY=VALUE), NAME()]` in a section, with Python's values.
pub(super) const LFM2: CallFormat = CallFormat {
    models: "LFM2",
    marks: &["List of tools: "],
    section: Some(Section { open: "<|tool_call_start|>[", close: "]<|tool_call_end|>" }),
    starts: &["<|tool_call_start|>"],
    opener: "",
    name: Name::Before("("),
    arguments: ArgumentForm::Literals(Dialect { equals: '=', end: ')', quote: "", between: ", " }),
    closer: "",
    between: ", ",
    ..HERMES
};

/// The same without tokens around it.
pub(super) const LLAMA_4: CallFormat = CallFormat {
    models: "Llama 4",
    marks: &["[func_name1("],
    place: Place::First,
    section: Some(Section { open: "[", close: "]" }),
    starts: &["["],
    ..LFM2
};

/// `{"name": .., "parameters": {..}}` as the whole answer; built-in tools as `<|python_tag|>NAME.call(KEY=VALUE)`.
pub(super) const LLAMA: CallFormat = CallFormat {
    models: "Llama 3.1, 3.2, 3.3, and 4",
    marks: &["\"parameters\": dictionary of argument name"],
    place: Place::First,
    starts: &["{"],
    opener: "{",
    name: Name::Field(Fields { before: "", arguments: "parameters", ..FIELDS }),
    closer: "}",
    between: "; ",
    other: Some(&LLAMA_PYTHON),
    ..HERMES
};

/// What Llama 3 writes to its built-in tools.
const LLAMA_PYTHON: CallFormat = CallFormat {
    marks: &["<|python_tag|>"],
    section: None,
    starts: &["<|python_tag|>"],
    opener: "<|python_tag|>",
    name: Name::Before(".call("),
    between: "",
    other: Some(&LLAMA_TAGGED),
    ..LFM2
};

/// What Llama 3.1 writes when it mixes both.
const LLAMA_TAGGED: CallFormat = CallFormat {
    marks: &["<|python_tag|>"],
    starts: &["<|python_tag|>"],
    opener: "<|python_tag|>",
    name: Name::Field(FIELDS),
    closer: "}",
    ..HERMES
};

/// `function call<|role_sep|>{"name": .., "arguments": {..}}` as a message of its own.
pub(super) const GIGACHAT: CallFormat = CallFormat {
    models: "GigaChat 3",
    marks: &["<|role_sep|>"],
    starts: &["function call<|role_sep|>"],
    opener: "function call<|role_sep|>",
    closer: "}",
    between: "",
    ..HERMES
};

/// `<|function_call|>{"name": .., "arguments": {..}}`.
pub(super) const GIGACHAT_31: CallFormat = CallFormat {
    models: "GigaChat 3.1",
    marks: &["<|function_call|>"],
    starts: &["<|function_call|>"],
    opener: "<|function_call|>",
    name: Name::Field(FIELDS),
    ..GIGACHAT
};

/// `<function=NAME>{..}</function>`.
pub(super) const FUNCTIONARY: CallFormat = CallFormat {
    models: "Functionary 3.1",
    marks: &["<function="],
    starts: &["<function="],
    opener: "<function=",
    name: Name::Before(">"),
    closer: "</function>",
    between: "",
    ..HERMES
};

/// `<function name="NAME"><param name="KEY">VALUE</param></function>`.
pub(super) const MINICPM: CallFormat = CallFormat {
    models: "MiniCPM5",
    marks: &["<function name=", "<param name="],
    starts: &["<function name="],
    opener: "<function name=",
    name: Name::Tag("\"", "\">"),
    arguments: ArgumentForm::Parameters(Frame {
        before_key: "<param name=\"",
        after_key: "\"",
        kind: Kind::Cdata,
        before_value: ">",
        after_value: "</param>",
        between: "",
        end: "",
    }),
    closer: "</function>",
    ..HERMES
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_hold_together() {
        for &format in FORMATS {
            assert_eq!(CallFormat::of(&format.marks.join(" ")), Some(format), "an earlier row takes its templates");
            let first = format.section.as_ref().map_or(format.opener, Section::marker);
            assert_eq!(format.starts[0], first, "the grammar's first text starts a call for the parser too");
            let end = match &format.arguments {
                ArgumentForm::Parameters(frame) if !frame.end.is_empty() => frame.end,
                ArgumentForm::Parameters(_) => format.closer,
                ArgumentForm::Json | ArgumentForm::Literals(_) => "}",
            };
            assert!(!end.trim().is_empty(), "{format:?}: nothing ends the arguments");
        }
    }

    #[test]
    fn the_documentation_has_every_row() {
        let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
        let row = |format: &&CallFormat| format!("| {} | `{}` |\n", format.models, cell(format.starts[0]));
        let table: String = FORMATS.iter().map(row).collect();
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/serving.md");
        let page = std::fs::read_to_string(page).unwrap();
        assert!(page.contains(&table), "docs/serving.md, under Tools, should have:\n{table}");
    }
}
