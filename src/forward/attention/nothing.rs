//! No attention: a layer that is only a feed-forward part.

use super::{Layer, Step};
use crate::Result;
use crate::backend::Backend;
use crate::forward::join::Stream;
use crate::forward::kv_cache::LayerCache;
use crate::forward::loader::Loader;
use crate::model::Nothing;

/// None.
pub struct Weights<B: Backend>(std::marker::PhantomData<fn(B)>);

impl<B: Backend> Weights<B> {
    pub(super) fn load(_: &Loader<'_, B>, _: &str, _: &Nothing) -> Result<Self> {
        Ok(Self(std::marker::PhantomData))
    }

    pub(super) fn bytes_per_token(&self, _: &B) -> usize {
        0
    }
}

/// None.
pub(super) struct Buffers<B: Backend>(std::marker::PhantomData<fn(B)>);

impl<B: Backend> Buffers<B> {
    pub(super) fn new(_: &B, _: &Nothing, _: &LayerCache<B>, _: usize) -> Result<Self> {
        Ok(Self(std::marker::PhantomData))
    }

    pub(super) fn set_rows(&mut self, _: &B, _: usize) {}
}

pub(super) fn attention<B: Backend>(
    _: &Step<'_, B>,
    _: Layer<'_, B, Nothing, Weights<B>>,
    _: &mut Buffers<B>,
    _: &mut B::Tensor,
    _: &mut Stream<'_, B>,
) -> Result<()> {
    Ok(())
}
