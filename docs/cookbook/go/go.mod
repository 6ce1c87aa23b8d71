module haul/cookbook

go 1.19
