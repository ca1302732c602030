"""Moebius in KTransformers' fork of SGLang: ``SGLANG_EXTERNAL_MODEL_PACKAGE=moebius.sglang_fork``.

See :mod:`moebius.sglang`.
"""

import logging

from sglang.srt.layers.moe import kt_ep_wrapper  # type: ignore[import-not-found,unused-ignore]

from moebius.sglang import KTMoEWrapper

kt_ep_wrapper.KTMoEWrapper = KTMoEWrapper
kt_ep_wrapper.KTRANSFORMERS_AVAILABLE = True
logging.getLogger("moebius").info("moebius computes the experts of --kt-weight-path")
