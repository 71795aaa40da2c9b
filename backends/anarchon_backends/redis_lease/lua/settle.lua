-- Slots that nobody claimed in time (S20, `machine.judge_plan`).

local function record_missed(job, key, slot, covered)
  local run = fresh_run(job, slot)
  run.trigger, run.slots_covered = 'schedule', covered
  end_run(run, 'skipped', 'missed')
  save_run(key, run)
end

-- Which of the slots from `first` to `last` have a row.
local function taken(key, first, last)
  local rows = {}
  local found = read(key .. ':runs', 'ZRANGEBYSCORE', key .. ':runs', text(first), text(last))
  for _, slot in ipairs(found) do
    rows[tonumber(slot)] = true
  end
  return rows
end

-- Records the newest `limit` of the slots, and one row for the rest with their number.
local function record_all(plan, key, lost)
  local first_shown = math.max(1, #lost - plan.limit + 1)
  local rest = first_shown - 1
  local covered_slot
  if rest > 0 or (plan.more and #lost > 0) then
    covered_slot = rest > 0 and lost[rest] or lost[first_shown]
    record_missed(plan.job, key, covered_slot, plan.more and MISSED_LISTED_MAX or rest)
  end
  for i = first_shown, #lost do
    if lost[i] ~= covered_slot then
      record_missed(plan.job, key, lost[i], 0)
    end
  end
end

return reply({
  answers = answers_of(batch.items, function(plan, key)
    local job = load_job(key, plan.schedule_id)
    if not job.settled or plan.settled ~= job.settled then
      return { outcome = 'stale', settled = text(job.settled) }
    end
    local over = {}
    for i, slot in ipairs(plan.slots) do
      if slot >= NOW - plan.deadlines[i] then
        break
      end
      over[i] = slot
    end
    if #over == 0 then
      return { outcome = 'done', settled = text(job.settled) }
    end
    local rows, lost = taken(key, over[1], over[#over]), {}
    for _, slot in ipairs(over) do
      if not rows[slot] and slot > job.floor then
        lost[#lost + 1] = slot
      end
    end
    record_all(plan, key, lost)
    redis.call('HSET', key, 'settled:' .. plan.schedule_id, text(over[#over]))
    return { outcome = 'done', settled = text(over[#over]), missed = #lost }
  end),
})
