//! The bytes of each token, as the tokenizer's decoder spells them.

/// The bytes of all tokens: those of `id` are `text[ends[id - 1]..ends[id]]`.
pub(super) struct TokenBytes {
    text: Vec<u8>,
    ends: Vec<u32>,
}

impl TokenBytes {
    /// Finds out how the tokenizer's decoder spells bytes: GPT-2's alphabet, `<0xNN>`, or `▁` for a space.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let decoder =
            tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok()).unwrap_or_default();
        let spelling = Spelling::of(&decoder);
        let vocab = tokenizer.get_vocab(true);
        let mut tokens: Vec<(u32, String)> = vocab.into_iter().map(|(token, id)| (id, token)).collect();
        tokens.sort_unstable();
        let added = tokenizer.get_added_tokens_decoder();
        let mut out = Self { text: Vec::new(), ends: Vec::new() };
        for (id, token) in tokens {
            // A missing id has no bytes. An id far beyond all others means a broken file, and must not fill memory.
            if (id as usize) < out.ends.len() || id as usize > out.ends.len() + (1 << 22) {
                continue;
            }
            out.ends.resize(id as usize, out.text.len() as u32);
            match added.contains_key(&id) {
                true => out.text.extend_from_slice(token.as_bytes()),
                false => spelling.write(&token, &mut out.text),
            }
            out.ends.push(out.text.len() as u32);
        }
        out
    }

    pub(super) fn get(&self, id: u32) -> &[u8] {
        let Some(&end) = self.ends.get(id as usize) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        &self.text[start as usize..end as usize]
    }
}

/// How a vocabulary spells bytes.
#[derive(Default)]
struct Spelling {
    alphabet: bool,      // GPT-2's: one character per byte
    byte_tokens: bool,   // `<0xNN>` is a byte
    spaces: Vec<String>, // what stands for a space
}

impl Spelling {
    fn of(decoder: &serde_json::Value) -> Self {
        let mut spelling = Self::default();
        spelling.read(decoder);
        spelling
    }

    fn read(&mut self, decoder: &serde_json::Value) {
        match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().into_iter().flatten().for_each(|inner| self.read(inner)),
            Some("ByteLevel") => self.alphabet = true,
            Some("ByteFallback") => self.byte_tokens = true,
            Some("Replace") if decoder["content"] == " " => {
                self.spaces.extend(decoder["pattern"]["String"].as_str().map(String::from))
            }
            Some("Metaspace") => self.spaces.extend(decoder["replacement"].as_str().map(String::from)),
            _ => {}
        }
    }

    fn write(&self, token: &str, out: &mut Vec<u8>) {
        if self.alphabet {
            let start = out.len();
            for c in token.chars() {
                match alphabet_byte(c) {
                    Some(byte) => out.push(byte),
                    None => {
                        // As the decoder does: a token with a character outside the alphabet means itself.
                        out.truncate(start);
                        return out.extend_from_slice(token.as_bytes());
                    }
                }
            }
            return;
        }
        let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
        if let Some(byte) = byte.filter(|_| self.byte_tokens).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            return out.push(byte);
        }
        let text = self.spaces.iter().fold(token.to_string(), |text, space| text.replace(space, " "));
        out.extend_from_slice(text.as_bytes());
    }
}

/// The byte that a character of GPT-2's alphabet stands for: printable Latin-1 means itself, the other 68 bytes follow
/// from U+0100 on.
fn alphabet_byte(c: char) -> Option<u8> {
    let itself = |c: u32| matches!(c, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    match c as u32 {
        code if itself(code) => Some(code as u8),
        code @ 0x100..0x144 => {
            (0..=0xFF).filter(|&byte| !itself(byte)).nth(code as usize - 0x100).map(|byte| byte as u8)
        }
        _ => None,
    }
}
