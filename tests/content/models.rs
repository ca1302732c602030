//! Templates in the manner of Qwen3, Qwen3-Coder, DeepSeek-V3 and V3.1, Llama 3 and gpt-oss: what they write around a
//! turn, and what of it they look for in messages. With the tokens of each, added to the tests' tokenizer as the
//! model's own file has them.

use std::path::Path;

use moebius::text::chat_template::{ChatTemplate, RenderOptions};
use moebius::text::content::Markers;
use moebius::text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// A model's text side, not yet read.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    template: &'static str,
    special: &'static [&'static str],
    added: &'static [&'static str], // tokens that are not special
    normalized: bool,               // the latter are looked for in normalized text
    tokens: &'static [&'static str],
    turns: &'static [&'static str],
}

/// A model's text side.
pub(crate) struct Model {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: ChatTemplate,
    pub(crate) markers: Markers,
    /// All that is added.
    pub(crate) tokens: &'static [&'static str],
    /// Those that begin and end turns.
    pub(crate) turns: &'static [&'static str],
    file: Value,
}

pub(crate) const QWEN: Form = Form {
    template: QWEN_TEMPLATE,
    special: &["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    added: &["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
    normalized: false,
    tokens: &[
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ],
    turns: &["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
};

pub(crate) const QWEN_CODER: Form = Form { template: QWEN_CODER_TEMPLATE, ..QWEN };

pub(crate) const DEEPSEEK: Form = Form {
    template: DEEPSEEK_TEMPLATE,
    special: &["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
    added: &[
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<think>",
        "</think>",
    ],
    normalized: true,
    tokens: &[
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<think>",
        "</think>",
    ],
    turns: &["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
};

pub(crate) const DEEPSEEK_V31: Form = Form { template: DEEPSEEK_V31_TEMPLATE, ..DEEPSEEK };

pub(crate) const LLAMA: Form = Form {
    template: LLAMA_TEMPLATE,
    special: &["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    added: &[],
    normalized: false,
    tokens: &["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    turns: &["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
};

pub(crate) const HARMONY: Form = Form {
    template: HARMONY_TEMPLATE,
    special: &["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"],
    added: &[],
    normalized: false,
    tokens: &["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"],
    turns: &["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"],
};

impl Form {
    pub(crate) fn with_template(self, template: &'static str) -> Self {
        Self { template, ..self }
    }

    pub(crate) fn load(self) -> Model {
        let bytes =
            std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/_tokenizer/tokenizer.json"))
                .unwrap();
        let mut file: Value = serde_json::from_slice(&bytes).unwrap();
        let size = file["model"]["vocab"].as_object().unwrap().len();
        // What the tests' tokenizer has added stands at the end of its ids, too.
        let first = file["added_tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| token["id"].as_u64().unwrap() as usize + 1)
            .max()
            .unwrap()
            .max(size);
        let token = |(i, (text, special)): (usize, (&&str, bool))| {
            json!({"id": first + i, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": !special && self.normalized, "special": special})
        };
        let own = self.special.iter().map(|text| (text, true)).chain(self.added.iter().map(|text| (text, false)));
        // The library counts on from what is added already.
        let old: Vec<Value> = file["added_tokens"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|token| !self.special.contains(&token["content"].as_str().unwrap()))
            .cloned()
            .collect();
        file["added_tokens"] = old.into_iter().chain(own.enumerate().map(token)).collect();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let variables = [("bos_token", self.special[0]), ("eos_token", *self.special.last().unwrap())];
        let variables = Map::from_iter(variables.map(|(name, text)| (name.to_string(), json!(text))));
        let template = ChatTemplate::compile(self.template, variables).unwrap();
        let markers = Markers::of(&tokenizer, self.template).unwrap();
        Model { tokenizer, template, markers, tokens: self.tokens, turns: self.turns, file }
    }
}

impl Model {
    pub(crate) fn id(&self, token: &str) -> u32 {
        self.tokenizer.added_token(token).unwrap()
    }

    pub(crate) fn text(&self, messages: &[Value], options: &RenderOptions) -> String {
        self.template.render(messages, options).unwrap()
    }

    pub(crate) fn prompt(&self, messages: &[Value], options: &RenderOptions) -> Vec<u32> {
        let prompt = self.markers.render(&self.template, messages, options).unwrap();
        assert_eq!(prompt.as_str(), self.text(messages, options));
        self.markers.encode(&self.tokenizer, &prompt).unwrap()
    }

    /// The prompt as it is when content is trusted.
    pub(crate) fn trusting(&self, messages: &[Value], options: &RenderOptions) -> Vec<u32> {
        self.tokenizer.encode(&self.text(messages, options), false).unwrap()
    }

    pub(crate) fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, false).unwrap()
    }

    /// Ids of words by the same tokenizer with nothing added.
    pub(crate) fn without_added_tokens(&self) -> impl Fn(&str) -> Vec<u32> + use<> {
        let mut file = self.file.clone();
        file["added_tokens"] = json!([]);
        let plain = tokenizers::Tokenizer::from_bytes(file.to_string()).unwrap();
        move |text| plain.encode(text, false).unwrap().get_ids().to_vec()
    }

    /// A text cut into the model's tokens and what stands between them.
    pub(crate) fn parts(&self, text: &str) -> Vec<Result<u32, String>> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((at, token)) = self.tokens.iter().filter_map(|token| Some((rest.find(token)?, *token))).min() {
            parts.extend([Err(rest[..at].to_string()), Ok(self.id(token))]);
            rest = &rest[at + token.len()..];
        }
        parts.push(Err(rest.to_string()));
        parts
    }
}

const QWEN_TEMPLATE: &str = r##"{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- "# Tools\n<tools>" }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{{- "\n</tools>\nCall so: <tool_call>\n{}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == "user" and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.searching = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == "assistant" %}{%- set content = message.content %}{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if loop.index0 > ns.last %}{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == "tool" %}{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"##;

const QWEN_CODER_TEMPLATE: &str = r##"{%- macro extra(fields, known) %}{%- for key, value in fields | items %}{%- if key not in known %}
{%- if value is string or value is number %}{{- '\n<' ~ key ~ '>' ~ value ~ '</' ~ key ~ '>' }}{%- else %}{{- '\n<' ~ key ~ '>' ~ (value | tojson) ~ '</' ~ key ~ '>' }}{%- endif %}
{%- endif %}{%- endfor %}{%- endmacro %}
{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{%- for tool in tools %}{%- set tool = tool.function %}
{{- '\n<function>\n<name>' ~ tool.name ~ '</name>' }}{%- if tool.description %}{{- '\n<description>' ~ (tool.description | trim) ~ '</description>' }}{%- endif %}
{%- for name, fields in (tool.parameters.properties or {}) | items %}{{- '\n<parameter>\n<name>' ~ name ~ '</name>' }}{{- extra(fields, ['type']) }}{{- '\n</parameter>' }}{%- endfor %}
{{- '\n</function>' }}{%- endfor %}{{- '\n</tools>\nCall so: <tool_call>\n<function=NAME>\n</function>\n</tool_call><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}{{- '<|im_start|>assistant\n' + message.content | trim }}
{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\n' ~ value ~ '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == "tool" %}{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>\n<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"##;

const DEEPSEEK_TEMPLATE: &str = r##"{%- set ns = namespace(system='', in_tools=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- set ns.system = ns.system + message['content'] + '\n\n' %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' %}{%- set content = message['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'tool' %}{{- '<｜tool▁outputs▁begin｜>' + message['content'] + '<｜tool▁outputs▁end｜>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"##;

const DEEPSEEK_V31_TEMPLATE: &str = r##"{%- set ns = namespace(system='', last_user=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.last_user = true %}{{- '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' %}{%- if ns.last_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}{%- set ns.last_user = false %}
{%- set content = message['content'] %}{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] %}{%- endif %}
{{- content + '<｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'tool' %}{{- '<｜tool▁outputs▁begin｜>' + message['content'] + '<｜tool▁outputs▁end｜>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt and ns.last_user %}{{- '<｜Assistant｜>' }}{%- if not thinking %}{{- '</think>' }}{%- else %}{{- '<think>' }}{%- endif %}{%- endif %}"##;

const LLAMA_TEMPLATE: &str = r##"{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}{{- "Today is " + strftime_now("%d %b %Y") + "\n\n" }}{%- for tool in tools or [] %}{{- tool | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}{{- system }}{{- "<|eot_id|>" }}
{%- for message in messages %}
{%- if message.role == 'tool' or message.role == 'ipython' %}{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}
{%- elif message.tool_calls %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- else %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"##;

const HARMONY_TEMPLATE: &str = r##"{{- "<|start|>system<|message|>You are a model.\nDate: " + strftime_now("%Y-%m-%d") + "<|end|>" }}
{%- if messages[0].role == "system" %}{%- set instructions = messages[0].content %}{%- set messages = messages[1:] %}{%- else %}{%- set instructions = "" %}{%- endif %}
{%- if instructions or tools %}{{- "<|start|>developer<|message|># Instructions\n\n" + instructions }}{%- for tool in tools or [] %}{{- "\n// " + (tool.function.description or "") + "\ntype " + tool.function.name + " = " }}{{- tool.function.parameters | tojson }}{%- endfor %}{{- "<|end|>" }}{%- endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}{{- raise_exception("give thoughts in a field of their own") }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- "<|start|>assistant to=functions." + call.function.name + "<|channel|>commentary json<|message|>" }}{{- call.function.arguments | tojson }}{{- "<|call|>" }}{%- endfor %}
{%- if message.content %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{%- endif %}
{%- elif message.role == "tool" %}{{- "<|start|>functions.f to=assistant<|channel|>commentary<|message|>" + message.content | tojson + "<|end|>" }}
{%- else %}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"##;
