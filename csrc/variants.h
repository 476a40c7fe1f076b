// Which variants of the kernels this processor can run.
#pragma once

#include "layout.h"

#include <vector>

namespace longdraft {

std::vector<const Kernels*> runnable();  // fastest first

}  // namespace longdraft
