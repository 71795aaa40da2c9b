"""The pure heart of the sidecar: values and functions; time comes in as an argument."""
