#include "simulator/network.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bmt::sim {

double ringAllReduce(double bytes, double n, double bandwidth, double alpha) {
  return 2 * (n - 1) / n * bytes / bandwidth + 2 * (n - 1) * alpha;
}

double ringGather(double bytes, double n, double bandwidth, double alpha) {
  return (n - 1) / n * bytes / bandwidth + (n - 1) * alpha;
}

double halvingDoublingAllReduce(double bytes, double n, double bandwidth, double alpha) {
  return 2 * (n - 1) / n * bytes / bandwidth + 2 * std::ceil(std::log2(n)) * alpha;
}

double doubleTreeAllReduce(double bytes, double n, double bandwidth, double alpha) {
  return 2 * bytes / bandwidth + 2 * std::ceil(std::log2(n)) * alpha;
}

double binomialAllReduce(double bytes, double n, double bandwidth, double alpha) {
  return 2 * std::ceil(std::log2(n)) * (alpha + bytes / bandwidth);
}

double hierarchicalAllReduce(double bytes, double g, double k, double inner_bandwidth, double outer_bandwidth,
                             double alpha) {
  return 2 * ringGather(bytes, g, inner_bandwidth, alpha) +
         ringAllReduce(bytes / g, k, outer_bandwidth, alpha);
}

double allToAll(double bytes, double n, double bandwidth, double alpha) {
  return (n - 1) / n * bytes / bandwidth + alpha;
}

double pointToPoint(double bytes, double bandwidth, double alpha) {
  return alpha + bytes / bandwidth;
}

namespace {

// Time on the wire of a ring that goes round `rounds` times: the chunk pipeline of each runs at half rate
// until `fill` has passed.
double wire(const Fabric& f, double seconds, double rounds) {
  return seconds + std::min(seconds, rounds * f.fill);
}

// Latency of a ring that walks through nodes: only the steps between nodes pay the network's.
double ringLatency(const Fabric& f, const GroupPlacement& at, double rounds) {
  const double between = at.nodes > 1 ? rounds * at.nodes : 0;
  return (rounds * (at.ranks - 1) - between) * f.link_latency + between * f.nic_latency;
}

double allReduceSeconds(const Fabric& f, double bytes, const GroupPlacement& at, double ring_bandwidth) {
  const double n = at.ranks;
  double best = std::max(0.0, ringLatency(f, at, 2)) + wire(f, ringAllReduce(bytes, n, ring_bandwidth, 0), 2);
  if (at.nodes > 1) {
    // Chains inside the nodes, a double tree across: more bytes per link, far fewer steps.
    const double latency =
        2 * ((at.per_node - 1) * f.link_latency + std::ceil(std::log2(at.nodes)) * f.nic_latency);
    best = std::min(best, latency + wire(f, doubleTreeAllReduce(bytes, n, ring_bandwidth, 0), 2));
  } else if (f.multicast_bandwidth > ring_bandwidth) {
    best = std::min(best, 2 * f.link_latency + wire(f, ringAllReduce(bytes, n, f.multicast_bandwidth, 0), 2));
  }
  return best;
}

}  // namespace

Fabric makeFabric(const NodeGroup& node, double oversubscription, const trace::GpuConstants& gpu) {
  Fabric f;
  f.link_bandwidth = node.scale_up.bandwidth * gpu.link_efficiency;
  f.link_latency = toSeconds(node.scale_up.latency);
  f.multicast_bandwidth = node.scale_up.bandwidth * gpu.multicast_efficiency;
  f.node_bandwidth = node.nics_per_node * node.nic.bandwidth * gpu.nic_efficiency / oversubscription;
  f.nics = node.nics_per_node;
  f.nic_latency = toSeconds(node.nic.latency);
  f.start = gpu.comm_start_s;
  f.fill = gpu.comm_fill_s;
  return f;
}

double collectiveSeconds(const Fabric& f, CommKind kind, double bytes, const GroupPlacement& at) {
  if (at.ranks <= 1) return 0;
  const bool across = at.nodes > 1;
  const double node_share = f.node_bandwidth / std::max(1.0, at.node_sharers);
  if (kind == CommKind::Send || kind == CommKind::Recv) {
    if (!across) return f.start + pointToPoint(bytes, f.link_bandwidth, f.link_latency);
    // One rank drives one NIC, or its share when more ranks than NICs send at once.
    const double one = std::min(f.node_bandwidth / std::max(1.0, f.nics), node_share);
    return f.start + pointToPoint(bytes, one, f.nic_latency);
  }
  // A ring through several nodes moves each byte over a NIC per node: all its members of a node together
  // drive the group's share of the NICs.
  double ring = f.link_bandwidth;
  if (across) {
    const double mine = std::min(node_share, at.per_node * f.node_bandwidth / std::max(1.0, f.nics));
    ring = at.per_node > 1 && f.link_bandwidth > 0 ? std::min(f.link_bandwidth, mine) : mine;
  }
  if (kind == CommKind::AllToAll) {
    // Of a rank's n parts, per_node stay inside the node. Links and NICs work at the same time.
    const double part = bytes / at.ranks;
    const double inside = (at.per_node - 1) * part, outside = (at.ranks - at.per_node) * part;
    const double one = std::min(f.node_bandwidth / std::max(1.0, f.nics), node_share / at.per_node);
    const double links = inside > 0 ? inside / f.link_bandwidth : 0, nics = across ? outside / one : 0;
    return f.start + (across ? f.nic_latency : f.link_latency) + wire(f, std::max(links, nics), 1);
  }
  if (kind == CommKind::Shift) {
    // Neighbours inside a node use links; where the ring leaves a node it needs one NIC.
    const double links = f.link_latency + (at.per_node > 1 || !across ? bytes / f.link_bandwidth : 0);
    if (!across) return f.start + links;
    const double one = std::min(f.node_bandwidth / std::max(1.0, f.nics), node_share);
    return f.start + std::max(links, pointToPoint(bytes, one, f.nic_latency));
  }
  switch (kind) {
    case CommKind::AllReduce:
      return f.start + allReduceSeconds(f, bytes, at, ring);
    case CommKind::AllGather:
    case CommKind::ReduceScatter:
      return f.start + std::max(0.0, ringLatency(f, at, 1)) +
             wire(f, ringGather(bytes, at.ranks, ring, 0), 1);
    case CommKind::AllToAll:
    case CommKind::Shift:
    case CommKind::Send:
    case CommKind::Recv:
      break;
  }
  return 0;
}

}  // namespace bmt::sim
