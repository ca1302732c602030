//! GGUF files, byte by byte.

/// A file in the making.
#[derive(Clone, Default)]
pub struct File {
    pub pairs: Vec<(String, Vec<u8>)>,              // key; type and value
    pub tensors: Vec<(String, Vec<u64>, u32, u64)>, // name, dimensions as the file has them, type, offset
    pub data: Vec<u8>,
}

pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl File {
    pub fn pair(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.pairs.push((key.into(), [&kind.to_le_bytes(), value].concat()));
        self
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.pair(key, 8, &string(value))
    }

    pub fn number(self, key: &str, value: u32) -> Self {
        self.pair(key, 4, &value.to_le_bytes())
    }

    /// A tensor of `bytes`, at the next multiple of 32.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, bytes: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self.tensors.push((name.into(), dims.to_vec(), kind, self.data.len() as u64));
        self.data.extend(bytes);
        self
    }

    pub fn floats(self, name: &str, dims: &[u64], values: &[f32]) -> Self {
        self.tensor(name, dims, 0, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            out.extend(string(key));
            out.extend(value);
        }
        for (name, dims, kind, offset) in &self.tensors {
            out.extend(string(name));
            out.extend((dims.len() as u32).to_le_bytes());
            out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}
