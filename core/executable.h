// What `train` can run. Everything that lowers can be simulated; a model or plan that this version's executor
// has no kernels or collectives for is refused here, with one line for each reason.
#pragma once

#include <vector>

#include "core/error.h"
#include "core/model_spec.h"
#include "core/plan.h"

namespace bmt {

// Empty = executable.
std::vector<Issue> notExecutable(const ModelSpec& model, const Plan& plan);

}  // namespace bmt
