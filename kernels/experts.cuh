// What the kernels of routed experts share.
#pragma once

constexpr int MAX_EXPERTS = 512;
