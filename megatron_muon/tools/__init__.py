"""Commands of `megatron-muon`, a module or package each; nothing else imports them."""
