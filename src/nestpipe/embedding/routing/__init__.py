"""From keys to messages: requests, owners, the wire format."""
