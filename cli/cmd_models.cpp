// bmtrain models: the presets with their parameter counts.
#include <fmt/format.h>

#include "cli/command.h"
#include "core/json.h"
#include "core/model_spec.h"

namespace bmt::cli {

void addModels(CLI::App& app, const Globals& globals, Action& action) {
  CLI::App* const command = app.add_subcommand("models", "List model presets, or show one as a model file");
  const auto name = std::make_shared<std::string>();
  command->add_option("NAME", *name, "Preset, config.json or model file to show");
  command->callback([&globals, &action, name] {
    action = [&globals, name] {
      if (!name->empty()) {
        fmt::print("{}", modelToJson(loadModel(*name)));
        return 0;
      }
      Json list = Json::array();
      if (!globals.json)
        fmt::print("{:<16} {:>18} {:>7} {:>8} {:>6} {:>3} {:>7} {:>8} {:>6}\n", "model", "parameters",
                   "layers", "d_model", "heads", "kv", "d_ff", "vocab", "seq");
      for (const ModelSpec& m : modelPresets()) {
        if (globals.json) {
          Json entry = Json::parse(modelToJson(m));
          entry["num_params"] = numParams(m);
          list.push_back(entry);
        } else {
          fmt::print("{:<16} {:>18} {:>7} {:>8} {:>6} {:>3} {:>7} {:>8} {:>6}\n", m.name, numParams(m),
                     m.layers, m.d_model, m.heads, m.kv_heads, m.d_ff, m.vocab, m.seq_len);
        }
      }
      if (globals.json) fmt::print("{}\n", list.dump(2));
      return 0;
    };
  });
}

}  // namespace bmt::cli
