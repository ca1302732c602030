//! `Route`: which experts each token goes to.

use std::ops::Range;

use super::dense::Dense;
use crate::Result;
use crate::model::Router;

/// Which experts each token goes to, and with what weight.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    /// Experts per token.
    pub top_k: usize,
    /// [tokens, top_k]; an id below 0 or beyond the layer's experts is skipped.
    pub ids: Vec<i32>,
    /// [tokens, top_k]
    pub weights: Vec<f32>,
}

impl Routing {
    /// Puts these tokens of `more` behind its own.
    pub fn append(&mut self, more: &Self, tokens: Range<usize>) {
        self.top_k = more.top_k;
        let choices = tokens.start * more.top_k..tokens.end * more.top_k;
        self.ids.extend_from_slice(&more.ids[choices.clone()]);
        self.weights.extend_from_slice(&more.weights[choices]);
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len() / self.top_k.max(1)
    }
}

/// Router logits, and experts chosen from them.
pub trait Route: Dense {
    /// Experts and weights of every token.
    type Routing: Send;
    /// Experts that all tokens of a pass are given, whatever the router says.
    type Choices: Send;

    /// Allocates a routing of at most `max_tokens` tokens.
    fn routing(&self, max_tokens: usize, top_k: usize) -> Result<Self::Routing>;
    /// Copies a routing to the host.
    fn read_routing(&self, routing: &Self::Routing, out: &mut Routing) -> Result<()>;
    /// Chooses every token's experts and their weights, scaling included.
    fn route(&self, w: &Self::Router, router: &Router, x: &Self::Tensor, out: &mut Self::Routing);
    /// The same where a table has the experts of the batch's tokens.
    fn route_by_token(
        &self,
        w: &Self::Router,
        router: &Router,
        batch: &Self::Batch,
        x: &Self::Tensor,
        out: &mut Self::Routing,
    );
    /// Room for the choices of passes of at most `choices` choices in all layers.
    fn choices(&self, choices: usize) -> Result<Self::Choices>;
    /// Brings a pass's choices to the device.
    fn set_choices(&self, to: &mut Self::Choices, ids: &[i32]);
    /// Replaces the experts of a routing, best first, by `choices` from number `first` on; weights stay.
    fn choose_experts(&self, choices: &Self::Choices, first: usize, out: &mut Self::Routing);
    /// `out[t] = weight * h[t]`, with the weight of the token's only expert, which becomes 1.
    fn weigh_input(&self, routing: &mut Self::Routing, h: &Self::Tensor, out: &mut Self::Tensor);
    /// `h = norm(x)`, and its routing. The default is what it means, a device may fuse it.
    fn norm_route(
        &self,
        x: &Self::Tensor,
        (norm, eps): (&Self::Norm, f32),
        h: &mut Self::Tensor,
        w: &Self::Router,
        router: &Router,
        out: &mut Self::Routing,
    ) {
        self.rms_norm(x, norm, eps, h);
        self.route(w, router, h, out);
    }
}
