// bmtrain clusters: the node presets; a name shows it as a cluster file to edit.
#include <fmt/format.h>

#include "cli/command.h"
#include "core/cluster_spec.h"
#include "core/json.h"

namespace bmt::cli {

void addClusters(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command =
      app.add_subcommand("clusters", "List cluster presets, or show one as a cluster file");
  const auto name = std::make_shared<std::string>();
  command->add_option("NAME", *name, "PRESET:NODES, local:RANKS or a cluster file to show");
  command->callback([&globals, &action, name] {
    action = [&globals, name] {
      if (!name->empty()) {
        fmt::print("{}", clusterToJson(loadCluster(*name)));
        return 0;
      }
      Json list = Json::array();
      if (!globals.json)
        fmt::print("{:<16} {:>4}  {:<18} {:>9}  {}\n", "preset", "per", "device", "memory", "node");
      for (const ClusterPreset& preset : clusterPresets()) {
        const NodeGroup& node = preset.node;
        if (globals.json) {
          list.push_back({{"name", preset.name},
                          {"description", preset.description},
                          {"device", node.device.name},
                          {"devices_per_node", node.devices_per_node},
                          {"memory_bytes", node.device.memory},
                          {"executed", node.device.executed},
                          {"source", node.device.source}});
        } else {
          fmt::print("{:<16} {:>4}  {:<18} {:>9}  {}\n", preset.name, node.devices_per_node, node.device.name,
                     formatBytes(node.device.memory), preset.description);
        }
      }
      if (globals.json) {
        fmt::print("{}\n", list.dump(2));
      } else {
        fmt::print("local[:RANKS]    this machine's CPU, as calibrated\n");
      }
      return 0;
    };
  });
}

}  // namespace bmt::cli
