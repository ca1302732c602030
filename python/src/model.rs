//! `Model`: a running engine with its tokenizer and chat template.

use std::ffi::OsString;
use std::sync::mpsc::{RecvTimeoutError, channel};

use moebius::engine::{Request, SamplingOverrides, SamplingParams};
use moebius::server::local;
use moebius::text::chat_template::RenderOptions;
use moebius::text::model::TextModel;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use serde_json::Value;

use crate::error::{Error, exception};
use crate::owned::{Owned, check_start};
use crate::residual::{self, CaptureRequest, Rows, SteerBy};
use crate::stream::{PATIENCE, Stream};

/// A running model.
#[pyclass(frozen)]
pub(crate) struct Model {
    model: Owned<TextModel>,
}

/// Sampling parameters and limits; `None` means the model's own default.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Params<'py> {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Vec<(u32, f32)>,
    seed: Option<u64>,
    max_tokens: Option<usize>,
    stop: Vec<String>,
    ignore_eos: bool,
    logprobs: Option<usize>,
    steer: Vec<SteerBy<'py>>,
    capture: Option<CaptureRequest>,
}

impl Params<'_> {
    /// The request, without prompt and constraint, and the strings that end its answer.
    fn request(self, default: &SamplingParams) -> PyResult<(Request, Vec<String>)> {
        let overrides = SamplingOverrides {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: Some(self.logit_bias),
            seed: self.seed,
        };
        let request = Request {
            max_tokens: self.max_tokens,
            sampling: overrides.over(default),
            ignore_eos: self.ignore_eos,
            logprobs: self.logprobs,
            steer: self.steer.into_iter().map(residual::steer).collect::<PyResult<_>>()?,
            capture: self.capture.map(residual::wanted).transpose()?,
            ..Request::default()
        };
        Ok((request, self.stop))
    }
}

#[pymethods]
impl Model {
    /// Opens `model` with the command's flags.
    #[new]
    fn new(py: Python<'_>, model: String, flags: Vec<OsString>, quiet: bool) -> PyResult<Self> {
        check_start()?;
        let (sender, mut opened) = channel();
        let open = move || drop(sender.send(moebius::cli::open(&model, &flags, quiet)));
        let thread = std::thread::Builder::new().name("open".into()).spawn(open);
        thread.map_err(|e| Error::new_err(format!("cannot start a thread: {e}")))?;
        loop {
            // After an interrupt the thread goes on, and frees what it has loaded when it is done.
            match py.detach({
                let opened = &mut opened;
                move || opened.recv_timeout(PATIENCE)
            }) {
                Ok(model) => return Ok(Self { model: Owned::new(model.map_err(exception)?) }),
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new_err("loading ended with a bug: its message is on stderr"));
                }
            }
        }
    }

    /// Description of the running model, as JSON.
    fn info(&self) -> PyResult<String> {
        serde_json::to_string(self.running()?.engine().info()).map_err(|e| Error::new_err(e.to_string()))
    }

    /// Continues a prompt. `form` is a JSON object with the format of the answer.
    fn generate(
        &self,
        py: Python<'_>,
        prompt: Bound<'_, PyAny>,
        params: Params<'_>,
        form: Option<String>,
    ) -> PyResult<Stream> {
        let model = self.running()?;
        let (mut request, stops) = params.request(model.sampling())?;
        let rows = Rows::new(request.capture.as_ref(), model.engine().info());
        let text = prompt.extract::<String>().ok();
        if text.is_none() {
            request.prompt = prompt
                .extract()
                .map_err(|_| PyTypeError::new_err("a prompt must be a string or a list of token ids"))?;
        }
        let started = py.detach(|| {
            if let Some(text) = text {
                request.prompt = model.tokenizer().encode(&text, true)?;
            }
            if let Some(form) = form {
                request.constraint = local::constraint(&model, &form)?;
            }
            let prompt = request.prompt.clone();
            Ok((model.complete(request, stops)?, prompt))
        });
        let (text, prompt) = started.map_err(exception)?;
        Ok(Stream::new(text, None, prompt, rows))
    }

    /// Answers a conversation, given as the fields of a chat completion in JSON.
    fn chat(&self, py: Python<'_>, fields: String, params: Params<'_>) -> PyResult<Stream> {
        let model = self.running()?;
        let (request, stops) = params.request(model.sampling())?;
        let rows = Rows::new(request.capture.as_ref(), model.engine().info());
        let started = py.detach(|| local::chat(&model, &fields, stops, request));
        let local::Chat { text, parser, prompt } = started.map_err(exception)?;
        Ok(Stream::new(text, parser, prompt, rows))
    }

    /// Token ids of a text.
    fn encode(&self, py: Python<'_>, text: String, add_special_tokens: bool) -> PyResult<Vec<u32>> {
        let model = self.running()?;
        py.detach(|| model.tokenizer().encode(&text, add_special_tokens)).map_err(exception)
    }

    /// Text of token ids.
    fn decode(&self, ids: Vec<u32>, skip_special_tokens: bool) -> PyResult<String> {
        self.running()?.tokenizer().decode(&ids, skip_special_tokens).map_err(exception)
    }

    /// Renders a conversation with the model's chat template: messages, tools or null, and additional variables, as
    /// JSON.
    fn render(
        &self,
        py: Python<'_>,
        messages: &str,
        tools: &str,
        variables: &str,
        add_generation_prompt: bool,
    ) -> PyResult<String> {
        let model = self.running()?;
        let wrong = |what: &str| PyValueError::new_err(format!("{what}: not valid for a chat template"));
        let Ok(messages) = serde_json::from_str::<Vec<Value>>(messages) else { return Err(wrong("messages")) };
        let Ok(tools) = serde_json::from_str(tools) else { return Err(wrong("tools")) };
        let Ok(kwargs) = serde_json::from_str(variables) else { return Err(wrong("variables")) };
        let options = RenderOptions { add_generation_prompt, tools, kwargs };
        py.detach(|| model.template()?.render(&messages, &options)).map_err(exception)
    }

    /// Tokens that end an answer.
    #[getter]
    fn eos_token_ids(&self) -> PyResult<Vec<u32>> {
        Ok(self.running()?.tokenizer().eos_ids().to_vec())
    }

    /// Rows of the embedding.
    #[getter]
    fn vocab_size(&self) -> PyResult<usize> {
        Ok(self.running()?.tokenizer().vocab_size())
    }

    /// Stops the engine and frees its memory, once running answers have ended or are closed.
    fn close(&self, py: Python<'_>) {
        let Some(model) = self.model.take() else { return };
        let engine = model.engine().clone();
        drop(model);
        py.detach(|| engine.stop());
    }
}

impl Model {
    fn running(&self) -> PyResult<TextModel> {
        self.model.with(|model| model.clone())
    }
}
