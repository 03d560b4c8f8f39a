"""llm-d's scheduling profiles: the filters, scorers, pickers, handlers and deciders of its `EndpointPickerConfig`."""
