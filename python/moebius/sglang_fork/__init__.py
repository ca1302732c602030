"""Moebius in KTransformers' fork of SGLang: ``SGLANG_EXTERNAL_MODEL_PACKAGE=moebius.sglang_fork``.

See :mod:`moebius.sglang`.
"""

import logging
import os

from sglang.srt.layers.moe import kt_ep_wrapper  # type: ignore[import-not-found,unused-ignore]

from moebius.sglang import THRESHOLD, KTMoEWrapper

# The fork streams prompts' experts in by itself.
os.environ.setdefault(THRESHOLD, "0")

kt_ep_wrapper.KTMoEWrapper = KTMoEWrapper
kt_ep_wrapper.KTRANSFORMERS_AVAILABLE = True
logging.getLogger("moebius").info("moebius computes the experts of --kt-weight-path")
