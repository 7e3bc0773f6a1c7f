"""What every family's table is made of: rows, configs and checks that name no family."""
