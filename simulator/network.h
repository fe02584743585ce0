// What a collective takes on links and NICs, by algorithm, and the choice a library would make.
//
// S = bytes of the full buffer, n ranks, B = bytes/s per rank and direction, alpha = seconds per step.
// Sources of the closed forms: Thakur, Rabenseifner, Gropp 2005 (ring, halving-doubling, binomial); Sanders,
// Speck, Traeff 2009 (two trees); of latencies and of the way a library chooses: NVIDIA/nccl@5067397c26
// src/graph/tuning.cc.
#pragma once

#include <cstdint>

#include "core/cluster_spec.h"
#include "core/task_graph.h"
#include "traces/cost_profile.h"

namespace bmt::sim {

double ringAllReduce(double bytes, double n, double bandwidth, double alpha);
double ringGather(double bytes, double n, double bandwidth, double alpha);  // all-gather and reduce-scatter
double halvingDoublingAllReduce(double bytes, double n, double bandwidth, double alpha);
double doubleTreeAllReduce(double bytes, double n, double bandwidth, double alpha);  // pipelined
double binomialAllReduce(double bytes, double n, double bandwidth, double alpha);    // not pipelined
// Reduce-scatter among g ranks of each of k nodes, all-reduce of the shards across, all-gather inside.
double hierarchicalAllReduce(double bytes, double g, double k, double inner_bandwidth, double outer_bandwidth,
                             double alpha);
double allToAll(double bytes, double n, double bandwidth, double alpha);
double pointToPoint(double bytes, double bandwidth, double alpha);

// Where the members of a group sit.
struct GroupPlacement {
  double ranks = 1;     // members
  double nodes = 1;     // nodes they span
  double per_node = 1;  // members on a node (of the first)
  // Groups of the same kind whose traffic crosses each NIC set at the same time: they share the node's NICs.
  double node_sharers = 1;
};

// Rates that one rank can reach, efficiencies already applied.
struct Fabric {
  double link_bandwidth = 0;       // B/s per direction between devices of a node; 0 = none
  double link_latency = 0;         // s per step inside a node
  double multicast_bandwidth = 0;  // B/s: all-reduce inside the switch (NVLS); 0 = none
  double node_bandwidth = 0;       // B/s per direction of all NICs of a node together, spine included
  double nics = 0;                 // NICs of a node; a single rank uses at most one
  double nic_latency = 0;          // s per step across nodes
  double start = 0;                // s per operation: launch and set-up
  double fill = 0;                 // s until the pipeline of chunks runs at full rate, per round of a ring
};

// What the collectives of one node type reach, with the device's efficiencies.
Fabric makeFabric(const NodeGroup& node, double oversubscription, const trace::GpuConstants& gpu);

// Seconds of `kind` alone on the fabric; 0 for one rank. `bytes` as in Comm: the full buffer, for a
// point-to-point message its length, for an all-to-all what one rank holds.
double collectiveSeconds(const Fabric& fabric, CommKind kind, double bytes, const GroupPlacement& at);

}  // namespace bmt::sim
