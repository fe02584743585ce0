// lower: specs and plan -> one static program per rank. Pure and deterministic; a rank's program does not
// depend on which other ranks are asked for.
#pragma once

#include <vector>

#include "core/cluster_spec.h"
#include "core/task_graph.h"

namespace bmt {

// The inputs must be legal (validatePlan is empty); BMT_CHECK otherwise. Buffers are already placed
// (planMemory).
TaskGraph lower(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan, RankSelection selection,
                Granularity granularity);
// Only these ranks (ascending); used by a process that executes one rank.
TaskGraph lower(const ModelSpec& model, const ClusterSpec& cluster, const Plan& plan,
                const std::vector<RankId>& ranks, Granularity granularity);

}  // namespace bmt
