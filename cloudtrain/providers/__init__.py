"""Providers: one module each; the module's name is the provider's. See `cloudtrain.provider_api.protocol`."""
